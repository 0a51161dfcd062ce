"""Faults in steps that are taken within backward, in place."""
from faults import F

b = "step_in_backward_tests StepAtOnce."
every = b + "NumbersAreThoseOfThePlainOrder"

F("FullyShardedDataParallelPlugin::step_at_once", "src/parallel/fsdp/translate.cpp",
  "settings.step_at_once = «plugin.step_at_once.value_or(false)»;", "false", every)
F("FullyShardedDataParallelPlugin::step_at_once of the environment", "src/parallel/fsdp/plugin.cpp",
  "plugin.step_at_once = «flag_or_false(\"FSDP_STEP_AT_ONCE\")»;", "false", b + "TheEnvironmentAsksForIt")
F("DeepSpeedPlugin::step_at_once", "src/parallel/zero/choose.cpp",
  "settings.step_at_once = «plugin().step_at_once.value_or(false)»;", "false", every)
F("DeepSpeedPlugin::step_at_once of the environment", "src/parallel/zero/plugin.cpp",
  "«environment::flag(\"ACCELERATE_DEEPSPEED_STEP_AT_ONCE\").value_or(false)»", "false", b + "TheEnvironmentAsksForIt")
F("DeepSpeed's plugins differ in step_at_once", "src/parallel/zero/plugins.cpp",
  "save, moe, msamp, level, version, in_backward, «at_once»));", "in_backward", b + "PluginsThatDifferInItAreTwo")

# ---- the step
file = "src/parallel/sharding/sharding.cpp"
F("writes before backward are shared before a unit is stepped on", file, "«units->share_again(*part.unit);»", "",
  b + "WritesBeforeBackwardAreSteppedOn")
F("a part that was stepped on is remembered", file, "stepped[part.index] = «1»;", "0", b + "WhatWouldActOtherwiseIsAnError")
F("what is computed with follows", file, "      store->before_step(*units);\n      «publish();»", "end_pass();",
  b + "WritesBeforeStepComeAfterIt")
F("step() ends a step that was taken", file, "std::exchange(impl_->step_is_taken, «false»)", "true", every)
F("micro-steps that accumulate take no step", "src/optim/optimizer.cpp",
  "«if (!self.gradients.sync_gradients()) return;»\n  require_steps_on_pieces", "", b + "TheLastMicroStepSteps")
F("gradients that were stepped on go", "src/optim/optimizer.cpp", "        «parameter.mutable_grad().reset();»\n        counts::add(optim::OptimCount::steps_at_once);",
  "", every)

F("what step() has to take is gone, too", "src/run_state/run_state.cpp", "if («here->steps_at_once()») forget_gradients(", "false",
  b + "WhatStepHasToTakeIsGoneToo")

# ---- what is refused
F("a second backward is an error", file, "if («step_is_taken») {\n      member.tensor", "false", b + "ASecondBackwardIsAnError")
F("forwards, clipping and cleared gradients are errors", file, "if («step_is_taken»)\n      raise<ConfigError>(\n          \"{}: found a backward",
  "false", b + "WhatWouldActOtherwiseIsAnError")
F("rates that change are one", "src/optim/optimizer.cpp", "«rates && *rates != rates_of(*self.optimizer)»", "false",
  b + "RatesThatChangeBeforeStepAreAnError")
F("a backward that throws is one", file, "    «if (settings.step_at_once)»\n      throw ConfigError(", "if (false)",
  b + "ABackwardThatThrowsLeavesNothingToGoOnWith")
F("loss scales are refused", "src/run_state/run_state.cpp", "if («optimizer.scaler() && optimizer.scaler()->is_enabled()»)\n      throw ConfigError(\n          \"step_at_once",
  "false", b + "WhatCanNotIsRefusedByName")
F("two optimizers are", "src/run_state/run_state.cpp", "if («++number > 1»)", "false", b + "WhatCanNotIsRefusedByName")
F("optimizers that need all are", "src/run_state/run_state.cpp", "if («!optim::steps_on_pieces(optimizer.optimizer()) ||\n        dynamic_cast<const optim::AsksOtherRanks*>(&optimizer.optimizer())»)",
  "false", b + "WhatCanNotIsRefusedByName")
F("a disk is, of FSDP", "src/parallel/fsdp/plugin.cpp", "if («*plugin.step_at_once && plugin.offload_folder»)", "false",
  b + "WhatCanNotIsRefusedByName")
F("a disk is, of DeepSpeed", "src/parallel/zero/choose.cpp", "if («sharding.states_on_disk || sharding.parameters_on_disk»)\n    throw",
  "false", b + "WhatCanNotIsRefusedByName")
F("clipping of a file is", "src/parallel/zero/choose.cpp", "if («settings.gradient_clipping > 0»)\n    raise", "false",
  b + "WhatCanNotIsRefusedByName")
F("all that must have gradients is", "src/parallel/zero/choose.cpp", "if («sharding.all_have_gradients»)\n    throw", "false",
  b + "WhatCanNotIsRefusedByName")
