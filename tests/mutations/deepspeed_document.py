"""Faults in how DeepSpeed's configurations are read, checked and filled."""
from faults import F

h = "plugins_tests Hjson."
s = "plugins_tests ZeroSettings."
e = "plugins_tests EffectiveConfiguration."
a = "plugins_tests FillAuto."

# ---- HJSON
file = "src/parallel/zero/hjson.cpp"
F("HJSON: comments", file, "if («peek() == '#'» || (peek() == '/'", "false", h + "HasWhatPeopleWriteIntoTheseFiles")
F("HJSON: texts of lines lose their indentation", file, "new_line && «i < indent» &&", "false",
  h + "HasWhatPeopleWriteIntoTheseFiles")
F("HJSON: a name twice", file, "if («twice != places.end()»)", "false", h + "ANameTwiceInAnObjectIsAnErrorAtEveryLevel")
F("HJSON: nesting ends", file, "if («depth_ == rules_.deepest»)", "false", h + "WhatIsWrongIsNamedWithLineAndColumn")
F("HJSON: files without outer braces", file, "if («!rules_.root_without_braces» || peek() == '{'", "true",
  h + "AFileMayDoWithoutItsOuterBraces")

# ---- reading
file = "src/parallel/zero/zero_settings.cpp"
F("DeepSpeed: notes", file, "if («name.starts_with('_')»)", "false", s + "UnknownKeysAreErrorsWithTheNearestName")
F("DeepSpeed: what is not in this version is refused", file, "if («options_.later_is_error» && !findings_.later.empty())",
  "false", s + "WhatIsNotInThisVersionIsRefusedWhereItWouldAct")
F("DeepSpeed: what would change nothing is not refused", file, "if («row.idle && row.idle(settings_, options_)») return;",
  "false", s + "WhatIsNotInThisVersionIsRefusedWhereItWouldAct")
F("DeepSpeed: secrets", file, "return «row.secret && !value.is_null()» ?", "false", e + "NeverHasTheKeyToAnAccount")
F("as_of_version: defaults", file, "if (row.moved && row.place && «is_before(options_.as_of_version, row.moved)»)",
  "false", s + "DefaultsAreThoseOfAVersion")
F("as_of_version: removed keys that are off", file, "if (is_off && «!removed_are_errors_»)", "false",
  s + "RemovedKeysNameWhatDoesItNow")
F("DeepSpeed: defaults of types", file, "if («!type.defaults») return;", "true", s + "TypesHaveTheirOwnDefaults")
F("DeepSpeed: bfloat16 is bf16", file, "section.empty() && «name == \"bfloat16\"»", "false", s + "OlderKeysAreRead")
file = "src/parallel/zero/setting_rules.cpp"
F("DeepSpeed: zero_hpz_partition_size has at most all ranks", file,
  "if («zero.stage == 3 && zero.zero_hpz_partition_size > options.ranks»)", "false",
  s + "ZeroPlusPlusActsWhereSomethingTravels")
F("DeepSpeed: zero_quantized_gradients needs reduce_scatter", file,
  "wrong(«zero.zero_quantized_gradients && zero.stage == 3 && !zero.reduce_scatter»,", "false",
  s + "ZeroPlusPlusActsWhereSomethingTravels")
F("DeepSpeed: ratio below stage 3", file, "wrong(«zero.offload_optimizer.ratio < 1 && zero.stage < 3»,", "false",
  s + "SettingsThatExcludeEachOther")
F("DeepSpeed: the numbers of a batch agree", "src/parallel/zero/batch.cpp", "«*all == *micro * *steps * ranks») return", "true",
  "conformance_tests deepspeed_batch")

# ---- the plugin, and "auto"
file = "src/parallel/zero/plugin.cpp"
F("as_of_version of the environment", file,
  "«environment::text(\"ACCELERATE_DEEPSPEED_AS_OF_VERSION\").value_or(\"0.19.8\")»", "std::string(\"0.19.8\")",
  "plugins_tests DeepSpeedPluginVersion.ComesFromTheProgramOrTheEnvironment")
F("DeepSpeed: steps_per_print of a file is told", file, "«config.document().gave_steps_per_print = true;»", "",
  e + "APluginWithoutAFileHasGivenNothing")
F("DeepSpeed: fields are no file", file, "«config.document().of_fields = true;»", "",
  e + "APluginWithoutAFileHasGivenNothing")
file = "src/parallel/zero/auto_values.cpp"
F("DeepSpeed: auto that nothing fills", file, "else if («known && known->classed»)", "false",
  a + "WhatNothingFillsIsDeepSpeedsDefaultOrAnError")
F("DeepSpeed: zero_force_ds_cpu_optimizer", file, "if («config.is_false(\"zero_force_ds_cpu_optimizer\")») return", "false",
  a + "AnOptimizerOfTheProgramStepsByTheKernelOfItsClass")
