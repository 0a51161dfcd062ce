#include "launch/starters/xla.hpp"

#include <fstream>

#include "launch/job/job.hpp"
#include "launch/job/require.hpp"

namespace accelerate::launcher {
namespace {

namespace fs = std::filesystem;

// FORK_LAUNCHED is how Hugging Face Accelerate knows that somebody has started its processes.
constexpr const char* kStarter =
    R"PY(# Written by `accelerate launch`: calls a function of a program in each of PyTorch/XLA's processes.
import importlib
import os
import sys


def call(index, module, function):
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    kind, name, function = sys.argv[1:4]
    try:
        import torch_xla.distributed.xla_multiprocessing as xmp
    except ImportError as error:
        sys.stderr.write(f"accelerate launch: --tpu needs PyTorch/XLA, and {sys.executable} can't import it: {error}. Install torch_xla there, or set PYTHON to a Python that has it\n")
        sys.exit(78)
    if kind == "script":
        sys.path.append(os.path.dirname(os.path.abspath(name)))
        name = os.path.splitext(os.path.basename(name))[0]
    else:
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(name)
    if not hasattr(module, function):
        sys.stderr.write(f"accelerate launch: {module.__file__} has no function '{function}', which each TPU process would call. --main_training_function names another one\n")
        sys.exit(64)
    sys.argv = [module.__file__] + sys.argv[4:]
    os.environ["FORK_LAUNCHED"] = "1"
    xmp.spawn(call, args=(name, function))
)PY";

}  // namespace

XlaStarter::XlaStarter(Job& job) {
  job.xla_starter = folder_.path() / job.xla_starter.filename();
  if (!(std::ofstream(job.xla_starter) << kStarter).flush())
    raise<LaunchError>("the file {} can't be written", job.xla_starter.string());
}

std::string training_function(const Job& job) {
  const std::string name = job.settings.text("main_training_function");
  return name.empty() ? "main" : name;
}

void require_python_program(const Job& job) {
  const std::string& name = job.command.front();
  const bool no_python = job.settings.on("no_python");
  require(
      !no_python && (job.settings.on("module") || fs::path(name).extension() == ".py"),
      "TPUs are driven by PyTorch/XLA, which is Python and which LibTorch does not have: '{}' is {}. Start a Python "
      "script or --module",
      name, no_python ? "given with --no_python" : "no Python script (.py)");
}

std::vector<std::string> xla_words(const Job& job) {
  require_python_program(job);
  const bool module = job.settings.on("module");
  const std::string& name = job.command.front();
  std::error_code ignored;
  require(module || fs::is_regular_file(name, ignored), "there is no script '{}' (seen from {})", name,
          fs::current_path(ignored).string());
  std::vector<std::string> words{job.xla_starter, module ? "module" : "script", name, training_function(job)};
  words.insert(words.end(), job.command.begin() + 1, job.command.end());
  return words;
}

}  // namespace accelerate::launcher
