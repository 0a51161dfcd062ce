// A program that starts processes; it is linked without LibTorch.
#include <accelerate/launch.hpp>

int main() { return accelerate::launch({.command = {"true"}, .num_processes = 2}); }
