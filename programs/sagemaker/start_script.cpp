#include "sagemaker/start_script.hpp"

#include <nlohmann/json.hpp>

namespace sagemaker {
namespace {

constexpr const char* kText = R"PY(
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

here = os.path.dirname(os.path.abspath(__file__))
program = os.path.join(here, PROGRAM)
hosts = json.loads(os.environ.get("SM_HOSTS", '["localhost"]'))
machine = hosts.index(os.environ.get("SM_CURRENT_HOST", hosts[0]))
local_size = int(os.environ.get("SM_NUM_GPUS") or 0) or 1
world_size = local_size * len(hosts)

libraries = [here]
torch = importlib.util.find_spec("torch")
if torch and torch.submodule_search_locations:
    libraries.append(os.path.join(torch.submodule_search_locations[0], "lib"))
if os.environ.get("LD_LIBRARY_PATH"):
    libraries.append(os.environ["LD_LIBRARY_PATH"])
common = dict(os.environ, LD_LIBRARY_PATH=":".join(libraries))
if world_size > 1:
    common.update(MASTER_ADDR=hosts[0], MASTER_PORT="29500", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(local_size),
                  GROUP_RANK=str(machine), GROUP_WORLD_SIZE=str(len(hosts)))
os.chmod(program, 0o755)

processes = []
signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes])
for local_rank in range(local_size):
    own = dict(common)
    if world_size > 1:
        own.update(RANK=str(machine * local_size + local_rank), LOCAL_RANK=str(local_rank))
    processes.append(subprocess.Popen([program] + ARGUMENTS + sys.argv[1:], env=own))

code = 0
running = list(processes)
while running:
    for process in list(running):
        if process.poll() is None:
            continue
        running.remove(process)
        if process.returncode and not code:
            code = process.returncode if process.returncode > 0 else 128 - process.returncode
            print(f"accelerate: process {processes.index(process)} of machine {machine} ended with {process.returncode}", file=sys.stderr, flush=True)
            for other in running:
                other.terminate()
    time.sleep(0.05)
sys.exit(code)
)PY";

}  // namespace

std::string start_script(const std::string& program, const std::vector<std::string>& arguments) {
  // JSON's texts are Python's, when everything beyond ASCII is escaped.
  const auto quoted = [](const nlohmann::json& value) { return value.dump(-1, ' ', /*ensure_ascii=*/true); };
  return "# Written by `accelerate launch` for this job.\nPROGRAM = " + quoted(program) +
         "\nARGUMENTS = " + quoted(arguments) + "\n" + kText;
}

}  // namespace sagemaker
