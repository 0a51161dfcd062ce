// Ours on one GPU; run.py starts it and peer.py in turns.
// usage: bench_gpu train 124m|774m|tiny
//        bench_gpu load|cpu_offload|disk_offload FOLDER TOKENS      FOLDER as peer.py's `prepare` has written it
//        bench_gpu all_reduce
//        bench_gpu products WIDTH
//        bench_gpu qlora FOLDER TOKENS
//        bench_gpu launch                                           what a launcher is to start
#include <accelerate/accelerate.hpp>

#include "codes.hpp"
#include "offload.hpp"
#include "train.hpp"

int main(int argc, char** argv) {
  return accelerate::record([&] {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    const auto is = [&](const char* task, size_t count) { return arguments.size() == count && arguments[0] == task; };
    if (is("train", 2)) bench::train_all(arguments[1]);
    else if (is("all_reduce", 1)) bench::all_reduces();
    else if (is("launch", 1)) bench::first_step();
    else if (is("products", 2)) bench::products(std::stoll(arguments[1]));
    else if (is("qlora", 3)) bench::qlora(arguments[1], std::stoll(arguments[2]));
    else if (is("load", 3)) bench::load(arguments[1], std::stoll(arguments[2]));
    else if (is("cpu_offload", 3) || is("disk_offload", 3))
      bench::offloaded(arguments[1], std::stoll(arguments[2]), arguments[0] == "disk_offload");
    else throw accelerate::ConfigError("bench_gpu: found no known task, expected one of those at the top of ours.cpp");
  });
}
