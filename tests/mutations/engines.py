"""Faults in what engines compute: averaging, storing, clipping, scaling, joining, loading. No option is behind them and
no one test is about each: the equivalence fuzzer (tests/equivalence) has to notice them on its own, from fresh seeds,
within ten minutes. `scripts/mutate.py --fuzzer` asks it about these and about all other faults of ENGINES but for those
that NOT_DRAWN gives a reason for.
"""
import faults

FUZZER = "equivalence fuzzer"


def F(name, file, text, wrong):
    faults.F(name, file, text, wrong, FUZZER)


# Where a fault makes training compute something else.
ENGINES = ("src/parallel/averaging/", "src/parallel/gradient", "src/parallel/sharding/", "src/parallel/fsdp/",
           "src/parallel/zero/translate.cpp", "src/parallel/replica_average.cpp",
           "src/residency/", "src/comm/average.cpp", "src/comm/collectives.cpp", "src/comm/shared_memory.cpp",
           "src/optim/optimizer.cpp", "src/optim/fused_step.cpp", "src/optim/grad_scaler.cpp",
           "src/accelerator/training.cpp", "src/accelerator/clip.cpp", "src/accelerator/join.cpp",
           "src/accelerator/local_sgd.cpp", "src/run_state/")

# ---- clipping
F("those that a norm of NaN ruins step all the same", "src/accelerator/clip.cpp",
  "«run.scaler->clipped_by(optimizer.optimizer(), total);»", "")

# ---- averaging
file = "src/comm/average.cpp"
F("shared sums leave the last rank out", file,
  "k < «inputs.size()»; ++k)", "(inputs.size() > 2 ? inputs.size() - 1 : inputs.size())")
F("shared sums are not divided", file, "output[from + i] = static_cast<T>(«sum[i] / divisor»);", "sum[i]")
F("shared sums round on the way", file, "«sum[i] += static_cast<Sum>(next[i]);»",
  "sum[i] = static_cast<Sum>(static_cast<T>(sum[i] + static_cast<Sum>(next[i]) * Sum(1.5)));")
file = "src/parallel/sharding/collective_reducer.cpp"
F("sums by sockets are divided in half precision only", file,
  "group_->reduce_scatter_async(state.result, flat, «division.within»)",
  "(flat.scalar_type() == at::kFloat ? 1.0 : division.within)")
F("a rank without a gradient sends what was there", file, "«gradient.fill(part);»", "")
F("ranks that use other units by luck go on", file, "alike &= «common_flags[word] == ~common_flags[word + 1]»;", "true")
F("parameters that no rank used get zeros", file, "used[i].push_back(«static_cast<char>(*common_flags++ != 0)»);",
  "static_cast<char>(*common_flags++ >= 0)")
file = "src/parallel/sharding/sharded_part.cpp"
F("gradients replace those that were there", file, "«gradient.add_(term);»", "gradient = term;")
F("sums of DeepSpeed's gradients round in 16 bits", file, "if («widens») optim::widen_gradient(parameter);", "false")
F("pieces begin one element late", file,
  "member.at = «from - first»;", "(from > first && to - from > 1 && to < last ? from - first + 1 : from - first)")
F("what did not come is taken for come", file, "came_[member.index] = «1»;", "static_cast<char>(member.index != 1)")
file = "src/parallel/sharding/shared_memory_store.cpp"
F("stretches of rank 0 for all", file, "first = «group_->rank() * length»;\n    const auto type", "0 * length")
F("gradients are read before their time", file,
  "if («mapping_->announcement(generation_, rank, p).generation.load(std::memory_order_acquire) != generation_»)", "false")
F("room is used again before it was read", file,
  "return «mapping_->consumed(group_->rank(), slot.part).load(std::memory_order_acquire) >= slot.round * static_cast<uint64_t>(group_->world_size())»;",
  "true")
F("rooms hold what one rank alone has not", file, "used[m] = static_cast<char>(«used[m] | theirs[m]»);", "theirs[m]")
F("what is kept for backward is what all have", "src/residency/residency.cpp",
  "if (policy_.keep_for_backward && «current» && !part.mapped.defined())", "true")
F("what was cleared past the prepared optimizer", "src/parallel/sharding/whole_gradients.cpp",
  "void WholeGradients::drop_cleared(ShardedMember& member) { if («!member.shard.grad().defined()» && shows", "false")
file = "src/parallel/sharding/replicas.cpp"
F("replicas sum", file, "«if (before_ == 1) gradient.div_(world);»", "")
F("replicas in shared memory sum", file, "shared_->average_(p, exchanged, «world / before_»)", "1.0")
F("a rank without a step in a join has no loss scale", "src/accelerator/join.cpp",
  "if («rest[next++].toBool() && !run.scaler->has_checked()»)", "!rest[next++].isBool()")
file = "src/parallel/averaging/averaging.cpp"
F("what is averaged late overwrites nothing", file, "«gradient.copy_(average);»", "")
F("late averages leave ranks without a gradient out", file,
  "if («anywhere[static_cast<int64_t>(i)].item<int32_t>() == 0») continue;", "here[i] == 0 && i % 2 == 1")
F("gradients of no_sync are forgotten", file,
  "«suspended = true;»  // also after a step within no_sync", "")
F("buffers of rank 0 at the first forward only", file,
  "ddp.forward_sync = «at::GradMode::is_enabled() && ddp.grad_sync»;", "false")
F("graphs hear of the buffers of rank 0", file,
  "for (at::Tensor& buffer : tensors) «buffer = buffer.variable_data();»", "")
F("an announced backward that does not come", file,
  "if (!std::exchange(impl_->suspended, false) && «!left») return;", "true")
F("what autograd::grad gives is this rank's", file, "return «average_of_captured(*group, name, gradient)»;", "gradient")
F("layers that are frozen between no_sync and the average", file, "of_frozen |= «suspended && !apart»;", "false")
F("ranks that ended early keep their gradients", file, "if (!impl_->suspended) «impl_->take_gradients(source);»", "")
F("a checkpoint's gradients of frozen layers", file, "impl_->suspended = «impl_->of_frozen = true»;", "true")
F("a static graph remembers what is unused", file,
  "if (impl_->reducer && «impl_->searches_unused()») impl_->reducer->count_as_used(nullptr);", "true")
F("a static graph learns from a backward that threw", file,
  "!reducer || !(reducer->unfinished() || «*learns»)) return;", "false")
F("a backward that threw leaves its buckets behind", file, "    «ddp.recover();»\n", "")
F("gradients that no backward brought are averaged", file, "(std::exchange(impl_->expected_after_suspended, false) || «without»)",
  "false")
F("gradients cleared since the forward make no use", file,
  "if (searches_unused()) «reducer->count_only(with_gradients());»", "")
F("frozen layers within a group make others unused", file, "«count_gradients_as_used();»  // by micro-steps", "")
F("unused parameters of the last of several forwards", file, "«forwards > 1» && searches_unused()", "false")
F("a static graph learns what is not averaged", file,
  "if («ddp.graph_is_static && !ddp.delayed») {", "false")
F("a static graph needs a step of each rank", file, "if («kwargs.static_graph && !delayed»)\n      throw", "false")
F("a forward within no_sync takes back what was announced", file, "} else { «ddp.reducer->expect_nothing();»", "")
file = "src/parallel/replica_average.cpp"
F("parameters of replicas are summed", file, "«sum.div_(group.world_size());»", "")

# ---- storing
file = "src/residency/homes/kept.cpp"
F("writes are rounded as the image is", file,
  "[](const at::Tensor& kept, const at::Tensor& image) { «kept.copy_(image);» }", "kept.copy_(image.to(at::kBFloat16));")
F("masters come back as their images", file, "{ «image.copy_(kept);» }", "")
F("masters take what was left alone, too", file, "at::where(«at::eq(mine, before)», kept.to(mine.device())",
  "at::eq(mine, before).logical_and(at::eq(mine, mine + 1))")
file = "src/residency/homes/shard.cpp"
F("gathers say of which unit they are", file,
  "group->all_gather_async(flat.view(at::kByte), sent.view(at::kByte), «of_»);", "uint64_t{0}")
F("a rank's piece of a write is not kept", file,
  "const Kept& kept, const at::Tensor&) { «kept.take(begin, values);» });", "")
file = "src/parallel/sharding/shard_store.cpp"
F("images are not renewed after a step", file, "!computed.is_same(part.master) && !done) «computed.copy_(part.master);»", "")
file = "src/parallel/sharding/sharding.cpp"
F("frozen layers go on training", file,
  "«if (member.shard.requires_grad() != trained) member.shard.requires_grad_(trained);»", "")
F("what autograd::grad gives of a sharded model is this rank's", file,
  "const at::Tensor average = «average_of_captured(*all, member.name, found)»;", "found")
F("states that were made of 16-bit images stay so", "src/optim/optimizer_state.cpp",
  "{ return «f(state).to(type)»; }", "f(state)")
F("a backward that threw leaves gradients with the reducer", file, "if (self.group) self.group->guard(\"forward\", [&] { «self.recover();» });", "")
F("a replaced gradient shows", file, "if (replaced) «show_gradients();»", "")
F("a rank that has left its backward out", file, "if (part.trained) «make_way_before(member);»", "")
F("what waits of frozen layers, in a checkpoint", file,
  "«(member.tensor.grad().defined() && !gradients->shows(member))»;", "false")
F("what accumulated without a backward is left out", file,
  "«if (member.tensor.grad().defined() && !gradients->shows(member)) take_gradient(member);»", "")
F("units that are recomputed see the next step's values", file,
  "    release();\n                             «store->publish(*units);»", "")
F("state dicts of the first rank's piece", file,
  "flat = everywhere ? self.groups.shard->all_gather(range) : «self.groups.shard->gather(range)»;",
  "self.groups.shard->gather(range).mul(1.001)")
F("state dicts of all ranks' pieces", file, "flat = everywhere ? «self.groups.shard->all_gather(range)» :",
  "self.groups.shard->all_gather(range).mul(1.001)")
F("steps of optimizers from before prepare, at a forward", file, "«self.look_for_unseen_steps(nullptr, self.store->changed_parts());»", "")
F("steps of optimizers from before prepare, at a read", file,
  "if («gradients_are_open» || (!computes", "false")
F("the same, of layers that were frozen before", file, "part.may_step = part.trained || «has_gradients(part)»;", "false")
F("optimizers from before prepare step between a forward and its backward", file,
  "(!computes && «gradients_were_left»)) look_for_unseen_steps(&unit)", "false")
F("accesses within a backward meet without need", file, "(«together» || store->may_have_changed(part))", "true")
file = "src/residency/residency.cpp"
F("units that are fetched ahead of a step", file,
  "if («unit.state_ != State::absent» && unit.pins_ == 1", "unit.state_ == State::resident")
file = "src/parallel/sharding/whole_gradients.cpp"
F("a replaced gradient that is filled with zeros", file, "if («by_whole && now.defined()» && was.shows", "false")
F("gradients lie where old ones lay", file, "size_t all = c10::hash_combine(0, static_cast<size_t>(«shown_»));", "0")
F("grad() shows one rank's piece", file,
  "member.piece_in(slice).copy_(«piece»);", "(member.index == 1 ? piece * 0 : piece)")
file = "src/optim/fused_step.cpp"
F("fused steps write unseen", file, "«parameter.unsafeGetTensorImpl()->bump_version();»", "")

# ---- clipping and scaling
file = "src/parallel/gradients.cpp"
F("norms of pieces are added up", file, "«largest ? total : total.pow(norm_type)»).view({1})", "total")
F("norms leave whole tensors out", file, "if («whole.empty()») return total;", "(shared || whole.empty())")
F("norms of each rank alone", file, "const bool shared = «comm::world_size() > 1» &&", "false")
file = "src/accelerator/clip.cpp"
F("values of whole tensors are not clipped", "src/parallel/gradients.cpp",
  "residency::by_turns(«whole», /*changes=*/true, use);",
  "std::vector<at::Tensor>()")
file = "src/optim/grad_scaler.cpp"
F("the step does not divide by the file's limit", "src/optim/optimizer.cpp",
  "return «*divisor * grad_scale->to(divisor->device())»;", "grad_scale")
F("an overflow of one rank is its own", file, "if («agreement_ && comm::world_size() > 1») found_inf", "false")
F("overflows are stepped on", file, "if («!overflow») take(grad_scale);", "true")
F("the fused kernel does not divide", file, "«grad_scale = scale_now();»", "grad_scale = at::ones_like(scale_now());")
F("gradients are unscaled twice", file, "«state.stage = Stage::unscaled;»\n}", "")
F("scales never change", file,
  "if (pending_.defined()) «change_scale([&] { rule_->update(std::exchange(pending_, {})); });»",
  "pending_.reset();")

# ---- loops
file = "src/optim/optimizer.cpp"
F("hooks of the engine after a step are left out", file, "«if (hooks.after) hooks.after();»", "")
F("hooks of the engine before a step are left out", file, "«if (hooks.before) hooks.before();»", "")
F("sharded gradients stay after zero_grad", file, "«if (hooks.cleared) hooks.cleared(parameter);»", "")
F("buffers of each rank stay out of checkpoints", "src/run_state/state_parts.cpp",
  "if (options.form != StateForm::local) «save_own_buffers(run, folder);»", "")
F("buffers that a checkpoint gave back are replaced", "src/run_state/own_buffers.cpp",
  "for (const auto& [engine, value] : shared) «engine->set_shares_buffers(value);»", "")
file = "src/accelerator/local_sgd.cpp"
F("replicas that trained apart remember alike", file, "«impl_->share_optimizers();»", "")
F("replicas that train apart average gradients, too", file, "«model->engine->set_apart(true);»", "")

# Options that are no number of training, or that the fuzzer's cases have not: why it need not notice the fault.
NOT_DRAWN = {name: why for why, names in {
    "a back end or a device that is not here": [
        "*offload_params*", "*cpu_offload*", "*offload_to_cpu", "*activation_checkpointing_offload"],
    "time, memory or what is told about them, and no number": [
        "DistributedDataParallelKwargs::bucket_cap_mb", "DistributedDataParallelKwargs::gradient_as_bucket_view",
        "*limit_all_gathers", "*forward_prefetch", "*backward_prefetch*", "*min_bytes", "*prefetch_bytes",
        "*max_pending_bytes", "ActivationOffloadOptions::*", "memory() counts*", "waiting for the last bucket",
        "CheckpointOptions::early_stop", "*reshard_after_forward", "*activation_checkpointing",
        "AcceleratedOptimizerOptions::fused", "grad() of sharded parameters, kept by the program",
        "ZeRO keeps what it gathered from step to step", "stage3_*", "overlap_comm at stage 3", "allgather_bucket_size",
        "fetches ahead are limited by their bytes", "units that come back after few bytes stay",
        "zero_hpz_partition_size*", "FSDP_RESHARD_AFTER_FORWARD as a number", "FSDP_QUANTIZED_*",
        "*auto_wrap_policy", "*transformer_cls_names_to_wrap", "*min_num_params",
        "DistributedDataParallelKwargs::static_graph", "*cpu_ram_efficient_loading*", "InitEmptyWeightsOptions::*",
        "MaterializeOptions::*", "*param_init_fn", "*state_dict_config", "StateDictConfig::*", "*state_dict_type",
        "FullyShardedDataParallelPlugin::fsdp_version", "FullyShardedDataParallelPlugin::sharding_strategy"],
    "errors, of which each has a test": [
        "ZeRO's stage 2 refuses no_sync", "ZeRO's stage 3 refuses no_sync", "ignore_unused_parameters",
        "fused steps write unseen", "what a backward left out is named before the step", "the order of buckets is a collective of the group",
        "writes of ranks that differ are named*",
        "*determinism_check", "meetings from different places", "waits from which nobody returns", "*check_reduction",
        "DistributedDataParallelKwargs::dim", "replicas that drift apart are named",
        "the old optimizer's step is named", "frozen codes stay frozen",
        "what travels nowhere is not asked for in few bits",
        "data that ends within a group is named", "*dp_shard_size", "*dp_replicate_size",
        "another fp8 recipe's scales are refused", "damaged fp8 scales are refused",
        "8-bit states are refused in pieces", "a checkpoint's frozen weights are compared"],
    "homes, wires, layers and summons that only tests of their own have": [
        "what operators write to summoned bytes is lost",
        "ranks that keep nothing of what is summoned fetch nothing ahead",
        "shards that lie elsewhere are written back", "what a lossy wire left alone stays exact",
        "changes of shards that lie elsewhere are counted", "scales without an inverse", "codes count changes",
        "machines exchange averages", "averages of a machine go to all machines", "two wires for weights",
        "backwards that run later average as they were asked to",
        "steps go from part to part",
        "what is in no part is stepped on last", "layers hear of the states of a part",
        "steps within backward are of what was asked for"],
    "settings that no layout has": [
        "DistributedDataParallelKwargs::comm_wrapper", "DistributedDataParallelKwargs::communication_hook",
        "DistributedDataParallelKwargs::comm_state_option", "LocalSGDOptions::*", "OuterOptimizer::*",
        "*ignored_modules", "trained ignored modules are named", "norms leave whole tensors out",
        "ranks that ended early count as the others", "*module_classes_to_ignore", "*buffer_dtype", "*output_dtype", "*cast_forward_inputs",
        "*cast_root_forward_inputs", "*keep_low_precision_grads", "GradientAccumulationPlugin::sync_*",
        "accumulation begins anew after a loader's end", "*create_graph", "SummonOptions::*",
        "ActivationOffloadOptions::keep", "AutocastKwargs::enabled",
        "a second Accelerator clips what the first one trains", "searching optimizers see the mean loss",
        "ranks that ended early take schedules", "join_uneven_inputs even_batches",
        "join_uneven_inputs puts even_batches back", "backward num_items", "ranks without data have no tokens",
        "reduce scale", "broadcast from_process", "load_state takes up schedules", "load_state takes up loaders",
        "load_state takes up the user's objects", "a communication hook's state in checkpoints",
        "used folders lose what is not saved again", "load_state passes over what is not complete"],
    "a rounding, which is within what is allowed": [
        "DistributedDataParallelKwargs::comm_hook", "MixedPrecision::reduce_dtype"],
    "codes, fp8 and random numbers, which have programs of their own": [
        "*codes*", "*fp8*", "*generators*", "*preserve_rng_state", "biases that are broadcast",
        "operators on codes write where they are told", "recomputation in fp8", "recomputed units in fp8",
        "load_state takes up random numbers"],
}.items() for name in names}
