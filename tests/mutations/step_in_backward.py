"""Faults in steps that are computed within backward, and taken over later."""
from faults import F

b = "step_in_backward_tests StepInBackward."
k = "step_kernels_tests StepKernels."

F("FullyShardedDataParallelPlugin::step_in_backward", "src/parallel/fsdp/translate.cpp",
  "settings.step_in_backward = «plugin.step_in_backward.value_or(false)»;", "false", b + "TheStepIsTakenOverInEveryLayout")
F("FullyShardedDataParallelPlugin::step_in_backward of the environment", "src/parallel/fsdp/plugin.cpp",
  "plugin.step_in_backward = «flag_or_false(\"FSDP_STEP_IN_BACKWARD\")»;", "false", b + "TheEnvironmentAsksForIt")
F("DeepSpeedPlugin::step_in_backward", "src/parallel/zero/choose.cpp",
  "settings.step_in_backward = «plugin().step_in_backward.value_or(false)»;", "false",
  b + "TheStepIsTakenOverInEveryLayout")
F("DeepSpeedPlugin::step_in_backward of the environment", "src/parallel/zero/plugin.cpp",
  "«environment::flag(\"ACCELERATE_DEEPSPEED_STEP_IN_BACKWARD\").value_or(false)»", "false", b + "TheEnvironmentAsksForIt")
F("DeepSpeed's plugins differ in step_in_backward", "src/parallel/zero/plugins.cpp",
  "save, moe, msamp, level, version, «in_backward», at_once));", "version", b + "PluginsThatDifferInItAreTwo")

# ---- when
F("a part that is complete alone is stepped on", "src/parallel/sharding/collective_reducer.cpp",
  "if (!has_all(part.index)) return false; «tell_given(part);»", "", b + "TheStepIsTakenOverInEveryLayout")
F("so is one of which a member has no gradient", "src/parallel/sharding/collective_reducer.cpp",
  "!has_all(part.index)) «tell_given(part);»", "", b + "UnusedParametersStayAsTheyAre")
F("parts are given while others are reduced", "src/parallel/sharding/collective_reducer.cpp",
  "if («!state.gradient.came(m)») return;", "true", b + "UnitsAreSteppedOnOneAfterTheOther")
F("gradients that were given are given once", "src/parallel/sharding/collective_reducer.cpp",
  "if («!states_[i].given») give(", "true", b + "TheStepIsTakenOverInEveryLayout")
F("in shared memory parts are stepped on when all have announced them", "src/parallel/sharding/shared_memory_store.cpp",
  "if (!replicas_ || apart_) «tell_given(part);»", "", b + "TheStepIsTakenOverInEveryLayout")
F("in shared memory replicas' parts, too", "src/parallel/sharding/shared_memory_store.cpp",
  "give(p), «tell_given(parts_[p])»;", "void()", b + "ReplicasStepWhenTheirAverageIsThere")
F("micro-steps that only accumulate compute nothing ahead", "src/optim/optimizer.cpp",
  "if (!reason && «self.gradients.sync_gradients()»)", "true", b + "AccumulationComputesTheLastStepOnly")
F("what can't step ahead is refused", "src/optim/optimizer.cpp", "if («!self.fused») reason =", "false",
  b + "OptimizersThatCanNotAreRefusedByName")
F("gradients are divided by the loss's scale ahead", "src/optim/optimizer.cpp",
  "«self.scaler && self.scaler->is_enabled()» ? self.scaler->get_scale() : 1", "false",
  b + "TheStepIsTakenOverInEveryLayout")

# ---- what is taken over
file = "src/optim/steps_ahead.hpp"
F("a step's gradients and parameters are those of the step ahead", file,
  "«kernels::digests(alone(lists, i).slices(), divisor).front() == one.read»;", "true",
  b + "NoHabitOfAProgramChangesItsNumbers")
F("its rates are, too", file, "if («!(one.rule == rule)» ||", "false", b + "NoHabitOfAProgramChangesItsNumbers")
F("its states are, too", file, "return «state.is_same(tensor_)» &&", "true", b + "NoHabitOfAProgramChangesItsNumbers")
F("nobody has written to its states", file, "«state._version() == version_» &&", "true",
  b + "NoHabitOfAProgramChangesItsNumbers")
F("nobody has written to its states past their versions", file, "(elsewhere_ || «sample_of(state) == sample_»)", "true",
  b + "NoHabitOfAProgramChangesItsNumbers")
F("states come with their parameter", file, "if («states[s].defined() && one.states[s].defined()») take_bytes(", "false",
  b + "TheStepIsTakenOverInEveryLayout")
F("parameters come", file, "if («one.parameter.defined()») lists.parameters[i].detach().copy_(", "false", b + "TheStepIsTakenOverInEveryLayout")
F("gradients of a step that was taken over are left divided", file, "«if (divisor != 1) kernels::divide_gradients(alone(lists, i).slices(), divisor);»",
  "", b + "GradientsAreLeftAsAStepLeavesThem")
F("new values are taken over once", file, "kernels::divide_gradients(alone(lists, i).slices(), divisor); «one.is_there = false;»", "",
  b + "TheStepIsTakenOverInEveryLayout")
F("after steps for nothing some are left out", file, "bool waits() const { return «waits_ > 0»; }", "false",
  b + "ARunThatClipsEachStepComputesFewAhead")

# ---- kernels
file = "src/optim/kernels/step.cpp"
F("steps ahead divide gradients", file, "if («divisor == 1») return;", "true", k + "AheadTheyGiveTheSameBitsAndChangeNothing")
F("steps ahead leave gradients as they are", file, "std::copy_n(data_, count, block_); loops_of<T>().divide(«block_», count",
  "const_cast<T*>(data_)", k + "AheadTheyGiveTheSameBitsAndChangeNothing")
F("digests know the place", "src/optim/kernels/step_bodies.hpp", "((before + static_cast<uint32_t>(i)) * «kSpread») | 1U", "0U",
  k + "DigestsTellWhatHasChanged")
F("digests have both halves of a double", "src/optim/kernels/step_bodies.hpp", "sum += (bits & 0xffffffffU) * weight + «(bits >> 32)» *",
  "0U", k + "DigestsTellWhatHasChanged")

# ---- of what lies on a disk
d = b + "BytesOnADiskComeAndGoWithinBackward"
h = b + "NoHabitOfAProgramChangesItsNumbersOnADisk"
file = "src/parallel/sharding/shards_on_disk.cpp"
F("the next group of a backward comes ahead", file, "&& «in_memory < how_.groups_in_memory») {", "false",
  b + "GroupsOnADiskComeAheadOfTheirStep")
F("a backward's order is that of the last one", file, "if («order_.empty()») return group > 0 ?", "true",
  b + "GroupsOnADiskComeAheadOfTheirStep")
F("nobody has written to masters on a disk", file,
  "if («has(masters[i]) && masters[i]._version() != ahead.versions[i]») return false;", "false", h)
F("nobody has touched what lies on a disk", file, "if («disk && disk->has(tensor) && disk->may_have_been_touched(tensor)») return false;",
  "false", h)
F("new values take the place of old ones on the disk of the states", file, "«if (states_) states_->exchange(ahead.tensors);»",
  "", d)
F("they do so on the disk of parameters", file, "«if (parameters_) parameters_->exchange(ahead.tensors);»", "", d)
F("two optimizers of one group step on it plainly", file, "if («ahead.shared») return false;", "false",
  b + "TwoOptimizersOfOneGroupStepPlainlyOnADisk")
F("a step ahead needs room on the disk", file, "if (can && «postpone(find_room)») return true;", "true",
  b + "AFullDiskIsNamedOnAllRanksAndLosesNothing")
F("gradients of a step that was taken over are divided on the disk", file, "if («gradients_here_.empty()») return;", "true",
  b + "ClippingAndOverflowsActOnADisk")
F("what a step is taken over of is all that it is computed of", "src/optim/fused_step.cpp",
  "«ahead_.count(these) != entries_.size()») return false;", "false", h)
F("what lies elsewhere is computed in its place", "src/optim/steps_ahead.hpp",
  "if («is(elsewhere, old)») fresh.reset(), all.push_back(old);", "false", d)
F("gradients that lie elsewhere are the same", "src/optim/steps_ahead.hpp",
  "divisor == one.divisor && «one.old_gradient.is_still(gradient)»", "true", h)
F("what is computed with is made ahead", "src/parallel/sharding/sharding.cpp",
  "disk.postpone([&] { «impl_->store->make_ahead(part);» });", "", d)
F("what was made ahead is taken", "src/residency/homes/kept_slice.cpp", "«DiskMemory::of(bytes)->exchange({bytes});»", "", d)
F("old values lie in the file while new ones are beside", "src/residency/disk/disk_memory.cpp",
  "for (const auto& place : places) { «Place::point(place, place->here.mapped);» values.push_back(", "",
  "residency_tests OnADisk.OtherValuesLieBesideThem")
F("factors of one leave gradients on a disk alone", "src/parallel/gradients.cpp",
  "factor.is_cpu() && «factor.item<double>() == 1») return;", "false", h)
