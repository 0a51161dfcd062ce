"""Faults in saving because of a signal, on ranks and in the launcher."""
from faults import F

s = "save_on_signal_tests SaveOnSignal."
c = "save_on_signal_tests CallRanks."
l = "save_on_signal_cli_tests SavingLaunch."

# ---- ranks
F("ProjectConfiguration::save_on_signal", "src/accelerator/accelerator.cpp",
  "if («!options.project_config.save_on_signal» ||", "true", s + "AProcessAloneSavesAndGoesOn")
F("save_on_signal needs names", "src/accelerator/accelerator.cpp",
  "if («project.save_on_signal && !project.automatic_checkpoint_naming»)", "false", s + "WhatCannotBeIsRefused")
F("signals do what they did after the training", "src/accelerator/accelerator.cpp",
  "«if (impl_->on_signal) impl_->on_signal->end();»", "", s + "AfterTheTrainingSignalsDoWhatTheyDid")
file = "src/accelerator/save_on_signal.cpp"
F("a handler of the program's is refused", file, "|| «(present.sa_handler != SIG_DFL && present.sa_handler != SIG_IGN)»)",
  "false", s + "WhatCannotBeIsRefused")
F("one Accelerator saves on signals", file, "if («save_points::detail::listener.load()»)", "false", s + "WhatCannotBeIsRefused")
F("a process that has saved says so by its exit code", file, "std::exit(«kSavedExitCode»);", "0",
  s + "AProcessAloneSavesAndGoesOn")
F("the step is finished", file, "|| «!accelerator_.sync_gradients()»)", "false", s + "AProcessAloneSavesAndGoesOn")
F("an evaluation that was cut short is over", file, "if («end_pass && evaluates()») end_pass();", "false",
  s + "AProcessAloneSavesAndGoesOn")
F("no evaluation is left out that would draw numbers", file, "if («!end_pass && evaluates()») return;", "false",
  s + "AProcessAloneSavesAndGoesOn")
F("nothing is saved behind the last batch", "src/data/prepared_loader.cpp", "if («ahead_ || failed_») save_points", "true",
  s + "AProcessAloneSavesAndGoesOn")
F("a rank that comes to no save point gives up", file, "if («!over») give_up();", "false",
  s + "ARankThatComesToNoSavePointSaysSoAndEndsAsBefore")
F("other ranks are called", file, "if («group») group->call_ranks();", "false",
  s + "AllRanksSaveAtOneStepWhoeverHearsTheSignal")
file = "src/comm/watchdog.cpp"
F("the furthest rank counts", file, "place = «std::max(place, read<int64_t>(answer_key(peer)))»;", "place",
  c + "TheFurthestIsKnownToAll")
F("a rank that leaves has been everywhere", file, "if («how_far && !answered») answer(", "false",
  c + "WhoLeavesHasBeenEverywhere")

# ---- the launcher
F("the launcher waits for ranks that save", "src/launch/supervise/supervisor.cpp", "if («waits_for_savers()») clock_",
  "false", l + "WaitsForRanksThatSaveBeyondItsGrace")
F("ranks that have saved have the grace to end", "src/launch/supervise/supervisor.cpp",
  "else if («std::exchange(waited_for_savers_, false)») clock_", "false", l + "WaitsForRanksThatSaveBeyondItsGrace")
F("SIGUSR1 that made ranks save starts nothing again", "src/launch/supervise/supervisor.cpp", "told_usr1_ = «true»;", "false",
  l + "PassesOnWhatSlurmSendsBeforeTheTimeLimitAndDoesNotStartAgain")
F("the launcher's exit code says that ranks have saved", "src/launch/job/outcome.cpp",
  "«if (saved()) return kSavedExitCode;»", "", l + "WaitsForRanksThatSaveBeyondItsGrace")
F("a machine that leaves says that its ranks have saved", "programs/agent/main.cpp", "«me_.code = code;»", "",
  l + "OtherMachinesGoOnFromTheCheckpoint")
file = "src/launch/machines/coordinator.cpp"
u = "launch_tests Coordinator."
F("a round without a machine whose ranks saved is no restart", file, "const bool saved = «std::all_of(failures.begin(), failures.end(), [](const Blame& failure) { return std::get<1>(failure) == kSavedExitCode; })»;", "false",
  u + "RoundAfterAMachineThatHadToGoWhenAllHadSavedIsNoRestart", u + "RanksThatSavedForAMachineThatCameHaveNotFailed")
F("a program that always ends with 75 is not started for ever", file, "!(saved && «moved» && enough))", "true",
  u + "WithoutEnoughMachinesRanksThatSavedEndTheJobWithTheirCode")
F("too few machines are no round", file, "!(saved && moved && «enough»))", "true",
  u + "WithoutEnoughMachinesRanksThatSavedEndTheJobWithTheirCode")
F("a machine that came is why ranks saved", file, "«joined_ = true», end_because", "0",
  u + "RanksThatSavedForAMachineThatCameHaveNotFailed")
