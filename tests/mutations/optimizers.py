"""Faults in optimizers and schedules."""
from faults import F

# ---- optimizers and schedules
r = "accelerator_tests AcceleratorRanks."
o = "options_tests OptionsOfTraining."
d = "data_tests DataLoader."
file = "src/optim/grad_scaler.cpp"
g = "optim_tests GradScalerTest."
rules, l = "src/optim/scale_rule.cpp", "deepspeed_optim_tests LossScale."
F("GradScalerKwargs::init_scale", rules, "scale_ = scale_on(device, «kwargs_.init_scale»);", "65536.0",
  r + "Fp16OverflowOnOneRankSkipsTheStepOnAll")
F("GradScalerKwargs::growth_factor", rules, "found_inf, «kwargs_.growth_factor», kwargs_.backoff_factor", "7.0",
  g + "SkipsOverflowShrinksAndGrows")
F("GradScalerKwargs::backoff_factor", rules, "found_inf, kwargs_.growth_factor, «kwargs_.backoff_factor»,", "0.125",
  g + "SkipsOverflowShrinksAndGrows")
F("GradScalerKwargs::growth_interval", rules, "kwargs_.backoff_factor, «kwargs_.growth_interval»);", "2000",
  g + "SkipsOverflowShrinksAndGrows")
F("gradients that wait follow the scale", file, "if (state.optimizer && state.scaled && «state.stage == Stage::ready»)",
  "false", g + "GradientsThatWaitFollowTheScale")
F("what was unscaled and not stepped is scaled again", file, "if («state.stage == Stage::unscaled») { multiply", "false",
  g + "GradientsThatWaitFollowTheScale")
F("the scale changes once for all optimizers", file,
  "«pending_ = pending_.defined() ? at::maximum(pending_, found_inf) : found_inf;»",
  "change_scale([&] { rule_->update(found_inf); });", g + "OneOptimizersOverflowIsNotTheOthersStep",
  l + "StepsOfOneRoundCountOnce")
F("an overflow at the smallest scale is said by its step", file, "«rule_->check(found_inf);»", "",
  l + "AnOverflowAtTheSmallestScaleIsAnErrorThatChangesNothing")
F("set_fp16_gradients", file, "check_and_unscale(optimizer, state, inverse, «fp16_gradients_», widening_);", "false",
  l + "Fp16GradientsAreTakenWhereTheyAreAllowed")
F("set_widening", file, "if («widens») widen_gradient(param);", "false", l + "WideningDividesInTheParametersType")
F("a scale of 1 asks for no particular step", file, "if («rule_->scales()») check_for_foreign_steps(state);", "true",
  l + "AFixedScaleStaysAndLooksForOverflows")
loss_cases = "conformance_tests deepspeed_loss_scaler"
F("DynamicLossScale min_scale", rules, "std::max(value() / kFactor, «settings_.min_scale»)", "0.0",
  l + "HalvesNoFurtherThanTheSmallest")
F("DynamicLossScale window", rules, "stable % «settings_.window» == 0;", "int64_t{1000}", loss_cases)
F("DynamicLossScale hysteresis", rules, "if («left_ > 1») --left_;", "false", loss_cases, l + "StepsOfOneRoundCountOnce")
F("DynamicLossScale consecutive_hysteresis", rules, "grows || «settings_.consecutive_hysteresis») left_", "false", loss_cases)
F("the first good step after an overflow does not count", rules, "stable = «updates_ - last_overflow_ - 1»;",
  "updates_ - last_overflow_", loss_cases)
F("the loss scale stays a number of fp32", rules, "if (grows && «value() * kFactor <= std::numeric_limits<float>::max()»)",
  "true", l + "GrowsNoFurtherThanItsTypeReaches")
F("a resumed loss scale knows its overflows", rules, "last_overflow_ = «last_overflow»;", "int64_t{-1}",
  l + "StatesResumeAnywhere")
F("a resumed loss scale is on its device", rules, "value_ = value; if («tensor_.defined()») tensor_.fill_(value);", "false",
  l + "StatesResumeAnywhere")
F("states of another rule are refused", rules, "if («state.boolean(\"dynamic\") != is_dynamic()») state.fail(", "false",
  l + "StatesAreReadStrictly")
F("the old optimizer's step is named", file, "«check_for_foreign_steps(state);»", "", g + "TheOldOptimizersStepIsNamed")
kernels, k = "src/optim/kernels/", "step_kernels_tests StepKernels."
F("halves below their smallest normal number", kernels + "step_bodies.hpp",
  "«std::bit_cast<float>(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal)»",
  "std::bit_cast<float>(magnitude)", k + "ConvertAsLibTorchDoes")
F("ties of numbers of 16 bits go to even", kernels + "step_bodies.hpp", "const uint32_t rounded = («bits + 0x7fff + (bits >> 16 & 1)») >> 16;",
  "bits + 0x8000", k + "ConvertAsLibTorchDoes")
F("a thread begins where its part of a stretch does", kernels + "step.cpp", "from = «std::max<int64_t>(begin - before, 0)»;",
  "0", k + "GiveTheSameBitsHoweverTensorsAreCut")
F("blocks that are converted go on where the last one ended", kernels + "step.cpp",
  "const int64_t count = «std::min(at_once, last - from)»;", "std::min(at_once, last - from) / 2 * 2",
  k + "GiveTheSameBitsHoweverTensorsAreCut")
F("converted states are written back", kernels + "step.cpp", "if («low_ && writes_») loops().narrow", "low_ && writes_ && count_ < 0",
  k + "RoundOnce")
F("divided gradients stay divided", kernels + "step.cpp", "if («divisor != 1») loops_of<T>().divide(", "false",
  k + "DivideGradientsAndLeaveThemDivided")
F("Adagrad's steps count", "src/optim/kernels/step.cpp", "(1 + «static_cast<double>(rule.step - 1)» * rule.lr_decay)", "0.0",
  "optim_tests OptimTest.FusedStepEqualsPlainStepWithinRounding")
F("Adagrad's groups that came later", "src/optim/optimizer.cpp", "if («place != nullptr») continue;", "true",
  "optim_tests OptimTest.AdagradStepsOnGroupsThatCameLater")
F("Adam makes up for the first steps", "src/optim/kernels/step.cpp", "rule.bias_correction ? «std::sqrt(1 - std::pow(rule.beta2, number))» : 1;", "1.0",
  "optim_tests OptimTest.FusedStepEqualsPlainStepWithinRounding")
F("AcceleratedOptimizerOptions::fused", "src/optim/optimizer.cpp", "if («options.fused.value_or(true)») impl_->fused",
  "true", "optim_tests OptimTest.FallsBackWhereTheKernelsCannot")
F("searching optimizers see the mean loss", "src/optim/optimizer.cpp",
  "comm::world_size() == 1 || «optim::steps_on_pieces(optimizer)»;", "true",
  "ddp_habits_tests DdpHabits.LbfgsEvaluatesEquallyOftenOnAllRanks")
own = "deepspeed_optim_tests OwnOptimizers."
F("Lion's directions are of its mean", kernels + "step_bodies.hpp", "const T mean = «rates.keep[0] * m + rates.add[0] * g»;", "m",
  own + "LionIsItsFormula")
F("Lion leaves what has no direction", kernels + "step_bodies.hpp", "mean > 0 ? T(1) : «mean < 0» ? T(-1) : mean;",
  "!(mean > 0)", own + "LionLeavesWhatHasNoDirection")
F("LionOptions::weight_decay", kernels + "step.cpp", "return {.shrink = static_cast<T>(«1 - rule.lr * rule.weight_decay»), .keep = {static_cast<T>(rule.beta1), static_cast<T>(rule.beta2)}, .add = {static_cast<T>(1 - rule.beta1), static_cast<T>(1 - rule.beta2)}, .lr =",
  "1.0", own + "LionIsItsFormula")
file = "src/optim/fused_step.cpp"
F("LionOptions::lr", file, "return {«options.lr()», beta1, beta2, options.weight_decay()};", "1e-3", own + "LionIsItsFormula")
F("LionOptions::betas", file, "return {options.lr(), «beta1», beta2, options.weight_decay()};", "0.9", own + "LionIsItsFormula")
F("DeepSpeedAdamOptions::bias_correction", file, "bucket.step, «options.bias_correction()»};", "true",
  own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::adam_w_mode", file, "«options.adam_w_mode()», bucket.step, options.bias_correction()", "true",
  own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::weight_decay", file, "«options.weight_decay()», options.adam_w_mode()", "0.0",
  own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::eps", file, "«options.eps()», options.weight_decay(), options.adam_w_mode()", "1e-8",
  own + "DeepSpeedAdamIsItsFormula")
file = "src/optim/own_step.hpp"
F("DeepSpeedAdamOptions::lr", file, "-«rule.lr» / correction1", "1e-3", own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::betas", file, "m.value.mul_(«rule.beta1»)", "0.9", own + "DeepSpeedAdamIsItsFormula")
F("DeepSpeedAdamOptions::fp32_optimizer_states", "src/optim/describe_own.hpp", "return «o.fp32_optimizer_states()» && (type", "true",
  own + "DeepSpeedAdamHasStatesAsExactAsAsked")
F("states that are read are as exact as those that are made", "src/optim/optimizer_state.cpp",
  "const auto options = parameter.options().requires_grad(false).dtype(«type»);", "parameter.scalar_type()",
  own + "DeepSpeedAdamHasStatesAsExactAsAsked")
file = "src/optim/lamb.cpp"
lamb = own + "LambIsItsFormula"
F("LambOptions::lr", file, "? «o.lr()» * std::sqrt(1", "1e-3", lamb)
F("LambOptions::betas", file, "m.value.mul_(beta1).add_(g.value, 1 - «beta1»)", "0.5", lamb)
F("LambOptions::eps", file, ": v.value.sqrt().add_(«o.eps()»);", "1e-8", lamb)
F("LambOptions::eps_inside_sqrt", file, "divisor = «o.eps_inside_sqrt()» ?", "false", lamb)
F("LambOptions::weight_decay", file, ".add_(p.value, «o.weight_decay()»);", "0.0", lamb)
F("LambOptions::bias_correction", file, "rate = «o.bias_correction()» ?", "true", lamb)
F("LambOptions::max_coeff", file, "clamp_(o.min_coeff(), «o.max_coeff()»);", "10.0", lamb)
F("LambOptions::min_coeff", file, "clamp_(«o.min_coeff()», o.max_coeff());", "0.01", lamb)
F("a norm of zero has no ratio", file, "at::where(«(length == 0).logical_or_(of_update == 0)»,", "of_update == 0", lamb)
file = "src/optim/muon.cpp"
muon = own + "MuonIsItsFormulaOnMatricesOfAnyShape"
F("MuonOptions::lr", file, "parameter.value.sub_(update, «o.lr()» * std::sqrt", "0.02", muon)
F("MuonOptions::weight_decay", file, "parameter.value.mul_(1 - o.lr() * «o.weight_decay()»); parameter.value.sub_", "0.0", muon)
F("MuonOptions::momentum", file, "momentum.value.lerp_(gradient, 1 - «o.momentum()»);", "0.95", muon)
F("MuonOptions::ns_method", file, "orthogonalized(matrix, «o.ns_method()»)", 'std::string("gram")', muon)
F("MuonOptions::use_muon", file, "if («o.use_muon()») { const Wide momentum", "o.use_muon() && o.lr() < 0", muon)
F("MuonOptions::betas", file, "first.value.lerp_(g, 1 - «beta1»);", "0.9", own + "MuonStepsByAdamOnTheRest")
F("MuonOptions::eps", file, "sqrt_().add_(«o.eps()»);", "1e-10", own + "MuonStepsByAdamOnTheRest")
F("MuonOptions::adam_w_mode", file, "const auto g = «o.adam_w_mode()» ? gradient", "true", own + "MuonStepsByAdamOnTheRest")
F("Newton-Schulz begins anew once", file, "if («i == kRestart») {", "false", muon)
F("Muon's outer layers are Adam's", file, "(«parameter.dim() >= 2 && !outer» ? of_muon", "parameter.dim() >= 2",
  own + "MuonsGroupsAreMatricesAndTheRest")
F("groups of own optimizers inherit", "src/optim/describe_own.hpp", "if («inherits») {", "false",
  own + "GroupsHaveOptionsOfTheirOwn")
F("groups of Muon are all their own", file, "defaults(), /*inherits=*/«false»);", "true", own + "GroupsHaveOptionsOfTheirOwn")
file = "src/optim/accelerated_scheduler.cpp"
F("schedules of split batches step once", file, "if («self.split_batches») return step_once();",
  "false", "optim_ranks_tests OptimRanks.SchedulesStepOncePerProcess")
e = "optim_tests Scheduler.EveryScheduleGivesPythonsRates"
cycles = o + "CyclesHaveTheirFactorsAndMomentums"
file = "src/optim/one_cycle.cpp"
F("OneCycleOptions::max_lr", file, "max_lrs_.push_back(«options.max_lr[options.max_lr.size() == 1 ? 0 : i]»);",
  "0.0123", e)
F("OneCycleOptions::pct_start", file, "«options.pct_start» * static_cast<double>(total_steps_)", "0.3", e)
F("OneCycleOptions::anneal_strategy", file, "if («options_.anneal_strategy == AnnealStrategy::linear») return", "false",
  e)
F("OneCycleOptions::three_phase", file, "if («options.three_phase») phases_", "false", e)
F("OneCycleOptions::cycle_momentum", file, "if («options_.cycle_momentum») set_momentum(groups[i].options(), anneal",
  "false", cycles)
F("OneCycleOptions::base_momentum", file, "options_.max_momentum : «options_.base_momentum»;", "0.85", cycles)
F("OneCycleOptions::max_momentum", file, "return max ? «options_.max_momentum» :", "0.95", cycles)
F("OneCycleOptions::div_factor", file, "max_lrs_[i] / «options.div_factor»;", "25.0", cycles)
F("OneCycleOptions::final_div_factor", file, "base_lrs_[i] / «options_.final_div_factor»", "1e4", cycles)
file = "src/optim/cyclic_schedules.cpp"
F("WarmRestartsOptions::T_0", file, "length_ = «options_.T_0»;", "int64_t{1}",
  "optim_tests Scheduler.StateHasPythonsKeysAndResumesAnywhere")
F("WarmRestartsOptions::T_0", file, "length_(«options.T_0»)", "int64_t{1}", e)
F("WarmRestartsOptions::T_mult", file, "length_ *= «options_.T_mult»;", "int64_t{1}", e)
F("WarmRestartsOptions::eta_min", file, "lr = «options_.eta_min» + (lr - options_.eta_min)", "0.0", e)
F("CyclicOptions::base_lr", file, 'one_per_group("base_lr", «options.base_lr»)', "std::vector<double>{0.0123}", e)
F("CyclicOptions::max_lr", file, 'one_per_group("max_lr", «options.max_lr»)', "std::vector<double>{0.123}", e)
F("CyclicOptions::step_size_up", file, "const int64_t up = «options.step_size_up»,", "int64_t{2000}", e)
F("CyclicOptions::step_size_down", file, "down = «options.step_size_down.value_or(up)»;", "up", e)
F("CyclicOptions::mode", file, "switch («options_.mode») {", "CyclicMode::triangular", e)
F("CyclicOptions::gamma", file, "std::pow(«options_.gamma», x)", "1.0", e)
F("CyclicOptions::scale_fn", file, "«if (options_.scale_fn) return options_.scale_fn(x);»", "", e)
F("CyclicOptions::scale_mode", file, "«options_.scale_mode == ScaleMode::cycle» ? cycle : static_cast", "true", e)
F("CyclicOptions::cycle_momentum", file,
  "if («options_.cycle_momentum») set_momentum(groups[i].options(), max_momentums_[i] - ", "false", cycles)
F("CyclicOptions::base_momentum", file, 'one_per_group("base_momentum", «options.base_momentum»)',
  "std::vector<double>{0.8}", cycles)
F("CyclicOptions::max_momentum", file, 'one_per_group("max_momentum", «options.max_momentum»)',
  "std::vector<double>{0.9}", cycles)
file = "src/optim/deepspeed_schedules.cpp"
cases, d = "conformance_tests deepspeed_schedules", "deepspeed_optim_tests DeepSpeedSchedules."
F("WarmupLROptions::warmup_min_lr", file, 'one_per_group("warmup_min_lr", «options.warmup_min_lr»)', "PerGroup(0.0123)", cases)
F("WarmupLROptions::warmup_max_lr", file, 'one_per_group("warmup_max_lr", «*options.warmup_max_lr»)', "PerGroup(0.0123)",
  cases)
F("WarmupLROptions::warmup_num_steps", file, "warmup_(name, «options.warmup_num_steps», options.warmup_type, options.as_of_version), first",
  "int64_t{1000}", cases)
F("WarmupLROptions::warmup_type", file, "is_log_(«type == \"log\"»)", "true", cases)
F("WarmupLROptions::last_batch_iteration", file, "resumed_at_ = «last_batch_iteration + 1»;", "int64_t{0}", cases,
  d + "GoOnAfterLastBatchIteration")
F("WarmupLROptions::as_of_version", file, "first_group_only_(«is_before(options.as_of_version, {0, 19, 4})»)", "false",
  d + "OlderVersionsActAsTheyDid")
F("WarmupDecayLROptions::total_num_steps", file, "steps_in_all(name(), «options.total_num_steps», warmup())) {}",
  "std::optional<int64_t>(100)", cases)
F("WarmupDecayLROptions::warmup_min_lr", file, ".warmup_min_lr = «options.warmup_min_lr»", "PerGroup(0.0123)", cases)
F("WarmupDecayLROptions::warmup_max_lr", file, ".warmup_max_lr = «options.warmup_max_lr»", "PerGroup(0.0123)", cases)
F("WarmupDecayLROptions::warmup_num_steps", file, ".warmup_num_steps = «options.warmup_num_steps»", "int64_t{1000}", cases)
F("WarmupDecayLROptions::warmup_type", file, ".warmup_type = «options.warmup_type»", 'std::string("log")', cases)
F("WarmupDecayLROptions::last_batch_iteration", file, ".last_batch_iteration = «options.last_batch_iteration»",
  "int64_t{-1}", d + "GoOnAfterLastBatchIteration")
F("WarmupDecayLROptions::as_of_version", file, ".as_of_version = «options.as_of_version»", "std::string()",
  d + "OlderVersionsActAsTheyDid")
F("WarmupCosineLROptions::total_num_steps", file, "steps_in_all(name(), «options.total_num_steps», warmup_)) {}",
  "std::optional<int64_t>(100)", cases)
F("WarmupCosineLROptions::warmup_min_ratio", file, "return «options_.warmup_min_ratio» + warmup_.share(step)", "0.0", cases)
F("WarmupCosineLROptions::warmup_num_steps", file, "warmup_(name(), «options.warmup_num_steps», options.warmup_type",
  "int64_t{1000}", cases)
F("WarmupCosineLROptions::cos_min_ratio", file, "std::max(0.0, «options_.cos_min_ratio» + ", "0.0001", cases)
F("WarmupCosineLROptions::warmup_type", file, "warmup_(name(), options.warmup_num_steps, «options.warmup_type»,",
  'std::string("log")', cases)
F("WarmupCosineLROptions::last_batch_iteration", file, '"warmup_cosine_lr", «options.last_batch_iteration»', "int64_t{-1}",
  d + "GoOnAfterLastBatchIteration")
F("WarmupCosineLROptions::as_of_version", file, "rises_again_(«is_before(options.as_of_version, {0, 19, 4})»)", "false",
  d + "OlderVersionsActAsTheyDid")
F("DeepSpeedOneCycleOptions::cycle_min_lr", file, 'checked("cycle_min_lr", «options.cycle_min_lr»)', "PerGroup(0.0123)", cases)
F("DeepSpeedOneCycleOptions::cycle_max_lr", file, 'checked("cycle_max_lr", «options.cycle_max_lr»)', "PerGroup(0.0123)", cases)
F("DeepSpeedOneCycleOptions::decay_lr_rate", file, "factor = decay(«options_.decay_lr_rate»);", "0.0", cases)
F("DeepSpeedOneCycleOptions::cycle_first_step_size", file, "return «options_.cycle_first_step_size»;", "2000.0", cases)
F("DeepSpeedOneCycleOptions::cycle_second_step_size", file,
  "second_(«options.cycle_second_step_size.value_or(options.cycle_first_step_size)»)", "options.cycle_first_step_size", cases)
F("DeepSpeedOneCycleOptions::cycle_first_stair_count", file, "stairs_[0] = «options.cycle_first_stair_count»,",
  "int64_t{0}", cases)
F("DeepSpeedOneCycleOptions::cycle_second_stair_count", file,
  "stairs_[1] = «options.cycle_second_stair_count.value_or(stairs_[0])»;", "stairs_[0]", cases)
F("DeepSpeedOneCycleOptions::decay_step_size", file, "+ 1) / «options_.decay_step_size»);", "1.0", cases)
F("DeepSpeedOneCycleOptions::cycle_momentum", file, "if («options_.cycle_momentum») for (size_t i = 0; i < groups.size(); ++i) set_betas",
  "true", d + "MoveBetasOrLeaveThem")
F("DeepSpeedOneCycleOptions::cycle_min_mom", file, 'checked("cycle_min_mom", «options.cycle_min_mom»)', "PerGroup(0.8)", cases)
F("DeepSpeedOneCycleOptions::cycle_max_mom", file, 'checked("cycle_max_mom", «options.cycle_max_mom»)', "PerGroup(0.9)", cases)
F("DeepSpeedOneCycleOptions::decay_mom_rate", file, "most * decay(«options_.decay_mom_rate»);", "0.0",
  d + "MoveBetasOrLeaveThem")
F("DeepSpeedOneCycleOptions::last_batch_iteration", file, '"deepspeed_one_cycle", «options.last_batch_iteration»',
  "int64_t{-1}", d + "GoOnAfterLastBatchIteration")
F("DeepSpeedOneCycleOptions::as_of_version", file, "if («is_before(options.as_of_version, {0, 19, 4})») stairs_[0]", "false",
  d + "OlderVersionsActAsTheyDid")
F("DeepSpeedOneCycleOptions::as_of_version and lists", file,
  "value.is_list() && «is_before(options_.as_of_version, {0, 19, 6})»", "false", d + "OlderVersionsActAsTheyDid")
F("LRRangeTestOptions::lr_range_test_min_lr", file, '"lr_range_test_min_lr", «options.lr_range_test_min_lr»',
  "PerGroup(1e-3)", cases)
F("LRRangeTestOptions::lr_range_test_step_size", file, "static_cast<double>(«options_.lr_range_test_step_size»);",
  "int64_t{2000}", cases)
F("LRRangeTestOptions::lr_range_test_step_rate", file, "1 + «options_.lr_range_test_step_rate» *", "1.0", cases)
F("LRRangeTestOptions::lr_range_test_staircase", file, "«options_.lr_range_test_staircase» ? std::floor(passed) : passed",
  "false", cases)
F("LRRangeTestOptions::last_batch_iteration", file, '"lr_range_test", «options.last_batch_iteration»', "int64_t{-1}",
  d + "GoOnAfterLastBatchIteration")
F("stairs are of whole steps", file, "return «std::floor(position) / stairs»;",
  "std::floor((rises ? within / top : (within - 1) / (top - 1)) * stairs) / stairs",
  d + "StairsReachTheTop")
F("DeepSpeed's schedules say the rate of a state that is read", file, "step_count_ = last_epoch_ + 1; «last_lrs_ = rates();»",
  "", d + "StatesAreAnIndexAndResumeAnywhere")
F("an unknown warmup_type is refused", file, "if («is_log_ || type == \"linear\"») return;", "true",
  d + "UnknownWarmupTypesAreRefusedWithTheNearest", cases)
file = "src/optim/chained_schedules.cpp"
F("LinearOptions::start_factor", file, "return lr * «options_.start_factor»;", "1.0 / 3", e)
F("LinearOptions::start_factor", file, "last_epoch_ == 0 ? «start» : 1.0 +", "1.0 / 3", e)
F("LinearOptions::end_factor", file, "? start : 1.0 + («end» - start)", "1.0", e)
F("LinearOptions::total_iters", file, "if (last_epoch_ > «total») return current_lrs();", "int64_t{5}", e)
file = "src/optim/lambda_schedules.cpp"
F("PolynomialDecayOptions::lr_end", file, "return «options.lr_end» / lr_init;", "1e-7", e)
F("PolynomialDecayOptions::power", file, "std::pow(remaining, «options.power»)", "1.0", e)
file = "src/optim/reduce_lr_on_plateau.cpp"
plateau = o + "PlateausHaveTheirBarAndTheirLeastStep"
F("ReduceLROnPlateauOptions::factor", file, "lrs[i] * «options_.factor»,", "0.1", e)
F("ReduceLROnPlateauOptions::patience", file, "num_bad_epochs_ > «options_.patience»", "int64_t{10}", e)
F("ReduceLROnPlateauOptions::min_lr", file, "options_.factor, «options_.min_lr.at(i)»)", "0.0", e)
F("ReduceLROnPlateauOptions::eps", file, "if (lrs[i] - reduced > «options_.eps»)", "1e-8", plateau)
F("ReduceLROnPlateauOptions::cooldown", file, "cooldown_counter_ = «options_.cooldown»;", "int64_t{0}", e)

# ---- schedules and padding, the rest
file = "src/optim/reduce_lr_on_plateau.cpp"
F("ReduceLROnPlateauOptions::maximize", file, "return «options_.maximize» ? metric > bar", "false", e)
F("ReduceLROnPlateauOptions::threshold", file, "options_.maximize ? «options_.threshold» : -options_.threshold;",
  "1e-4", plateau)
F("ReduceLROnPlateauOptions::threshold", file, "options_.maximize ? options_.threshold : «-options_.threshold»;",
  "-1e-4", plateau)
F("ReduceLROnPlateauOptions::absolute_threshold", file, "= «options_.absolute_threshold» ? best_ + margin", "false",
  plateau)
file = "src/optim/one_cycle.cpp"
F("OneCycleOptions::total_steps", file, "options.total_steps ? «*options.total_steps» :", "int64_t{17}", e)
F("OneCycleOptions::epochs", file, ": «*options.epochs» *", "int64_t{5}",
  "optim_tests AcceleratedSchedulerTest.OneCycleNeverPassesItsEnd")
F("OneCycleOptions::steps_per_epoch", file, "*options.epochs * «*options.steps_per_epoch»;", "int64_t{7}",
  "optim_tests AcceleratedSchedulerTest.OneCycleNeverPassesItsEnd")
file = "src/utils/ops.cpp"
pad = "comm_tests Comm.PadAcrossProcesses"
F("PadOptions::dim", file, "pad_to(const at::Tensor& tensor, int64_t size, const PadOptions& options) { "
  "const int64_t dim = «options.dim < 0 ? options.dim + tensor.dim() : options.dim»;", "int64_t{0}", pad)
F("PadOptions::pad_index", file, "at::full(sizes, «options.pad_index», tensor.options());", "0", pad)
F("PadOptions::pad_first", file, "narrow(dim, «options.pad_first» ? missing", "false", pad)

F("EncodeOptions::max_length", "src/models/wordpiece.cpp", "limit = «how.max_length».value_or(",
  "std::optional<int64_t>()", "wordpiece_tests WordPiece.TemplatesTruncationAndPadding")
F("OffloadedWeightsLoaderOptions::index", "src/bigmodel/offload.cpp", "for (auto& [name, weight] : «*options.index») {",
  "OffloadIndex()", "bigmodel_tests OffloadFolder.WhatIsInMemoryGoesFirst")
F("LoadCheckpointOptions::offload_buffers", "src/bigmodel/loading.cpp",
  "(!target.is_buffer || «options.offload_buffers»);", "false",
  "bigmodel_tests LoadCheckpoint.PartsOnDiskLieInTheFileAndComputeAlike")
F("LoadCheckpointOptions::offload_folder", "src/bigmodel/loading.cpp",
  "const auto& folder = «plan.options.offload_folder»;", 'std::filesystem::path("elsewhere")',
  "bigmodel_tests LoadCheckpoint.ConvertsAndKeepsWhatWasAskedFor")
F("PippyOptions::no_split_module_classes", "src/parallel/pipeline/plan.cpp",
  "const auto& classes = «options.no_split_module_classes»;", "std::vector<std::string>()",
  "pipeline_tests Pipeline.WrongSplitPointsAreNamed")
F("DryRunOptions::process_index", "src/accelerator/dry_run.cpp",
  ".process_index = «options.process_index», .num_processes = options.num_processes, .traffic", "int64_t{0}",
  "dry_run_tests DryRun.AllRanksHaveTheSameToDo")
F("MaterializeOptions::device", "src/residency/deferred/materialize.cpp",
  "if («options.device && options.device->is_meta()») return", "false",
  "deferred_tests DeferredIdentity.OnTheMetaDeviceNothingIsDrawn")
file = "src/residency/activations/offload.cpp"
F("ActivationOffloadOptions::directory", file, "if («!options.directory && !residency::current_accelerator()») return;",
  "!residency::current_accelerator()", "activations_tests ActivationOffloadTest.MemoryFallsAndIsFetchedAheadInBackward")
F("ActivationOffloadOptions::keep", file, "return «options_.keep && options_.keep(tensor)»;", "false",
  "activations_tests ActivationOffloadTest.ParametersTheirViewsAndSmallTensorsStay")
F("ActivationOffloadOptions::max_pending_bytes", file,
  "make_disk_home(*options.directory, «options.max_pending_bytes»)", "std::numeric_limits<int64_t>::max()",
  "activations_tests ActivationOffloadTest.ForwardWaitsForTheDiskWhereTooMuchIsPending")

# ---- 8-bit optimizers
file = "src/optim/adam8bit.cpp"
s = "adam8bit_tests Adam8bitTest.TwentyStepsAreThoseOfBitsandbytesToTheBit"
F("AdamW8bitOptions::lr", file, "lr(«options.lr()»),", "1e-3", s)
F("AdamW8bitOptions::betas", file, "beta1(«std::get<0>(options.betas())»),", "0.9", s)
F("AdamW8bitOptions::betas, second", file, "beta2(«std::get<1>(options.betas())»),", "0.999", s)
F("AdamW8bitOptions::eps", file, "eps(«options.eps()»),", "1e-8", s)
F("AdamW8bitOptions::weight_decay", file, "decay(1 - options.lr() * «options.weight_decay()»)", "0.01", s)
F("AdamW8bitOptions::min_8bit_size", file, "parameter.numel() >= «options.min_8bit_size()»", "4096", s)
F("paged states leave memory", "src/optim/adam8bit.cpp", "«work[i].state->let_go();»", "",
  "adam8bit_tests Adam8bitTest.PagedStatesAreEqualToTheBitAndOutOfMemory")
F("AdamW8bitOptions::paging_folder", "src/optim/adam8bit.cpp",
  "const bool given = «!options.paging_folder().empty()»;", "false",
  "adam8bit_tests Adam8bitTest.WhatCanNotWorkIsRefusedByName")
F("AdamW8bitOptions::paged", "src/optim/adam8bit.cpp",
  "if («!options.paged()» || parameter.numel() < kLeastPaged) return MomentPlace::beside_parameter;", "true",
  "adam8bit_tests Adam8bitTest.PagedStatesAreEqualToTheBitAndOutOfMemory")
F("a second moment that is not zero stays so", "src/codes/blockwise.cpp",
  "«codes[code] == 0 && value > 0 && codes[0] == 0» ? 1", "false",
  "adam8bit_tests Adam8bitTest.ASmallGradientAndThenNoneIsASmallStep")
F("8-bit states are refused in pieces", "src/run_state/run_state.cpp", "if («optim::has_own_state_dict(optimizer)» &&",
  "false", "adapters_ranks_tests Adam8bitRanks.ShardsAreRefusedByName")
