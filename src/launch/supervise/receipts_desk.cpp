#include "launch/supervise/receipts_desk.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <string>

#include "accelerate/utils/receipts.hpp"
#include "input/read_file.hpp"
#include "launch/job/job.hpp"
#include "launch/system/output.hpp"

namespace accelerate::launcher {
namespace {

constexpr int kWithoutEffect = 65;  ///< as for other input that is wrong (EX_DATAERR of sysexits.h)

}  // namespace

ReceiptsDesk::ReceiptsDesk(Job& job) : job_(job) {
  if (job.settings.text("receipts").empty()) return;
  folder_.emplace();
  job.receipts_file = folder_->path() / "receipts.json";
}

int ReceiptsDesk::close(int exit_code) const {
  if (!folder_) return exit_code;
  if (job_.round && job_.round->first_rank > 0) {
    if (!job_.quiet())
      say_on_stderr(
          fmt::format("receipts: rank 0 is on machine 0 of {}, whose launcher prints them if it has --receipts",
                      job_.num_machines));
    return exit_code;
  }
  const bool strict = job_.settings.text("receipts") == "strict";
  std::string text;
  read_file(job_.receipts_file, kMostSettingsBytes, text);
  if (text.empty()) {
    if (exit_code != 0) return exit_code;  // the job has said why
    say_on_stderr("no receipts: the main process made no Accelerator of this library, or ended without its end");
    return strict ? kWithoutEffect : 0;
  }
  const Receipts receipts = Receipts::from_json(text);
  std::fputs(job_.settings.on("json") ? (text + "\n").c_str() : receipts.text().c_str(), stdout);
  std::fflush(stdout);
  return exit_code == 0 && strict && !receipts.without_effect().empty() ? kWithoutEffect : exit_code;
}

}  // namespace accelerate::launcher
