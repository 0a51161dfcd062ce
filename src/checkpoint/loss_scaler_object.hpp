#pragma once

#include <ATen/core/ivalue.h>

#include "formats/torch_archive.hpp"

namespace accelerate::checkpointing {

/// An object of DeepSpeed's own class, which its optimizers take over as it is.
/// @param state  a dict of its attributes, of GradScaler::state_dict() or as such an object was read; None: a scale of
/// 1
inline void write_loss_scaler(formats::TorchPickle& pickle, const c10::IValue& state, bool dynamic) {
  const auto write = [&](const char* key, const c10::IValue& value) { pickle.text(key), pickle.value(value); };
  pickle.global("deepspeed.runtime.fp16.loss_scaler", dynamic ? "DynamicLossScaler" : "LossScaler");
  pickle.empty_tuple(), pickle.new_object();
  pickle.empty_dict(), pickle.mark();
  if (state.isGenericDict()) {
    for (const auto& entry : state.toGenericDict()) {
      const auto& key = entry.key().toStringRef();
      if (key != "raise_error_at_min_scale" && key != "dtype") write(key.c_str(), entry.value());
    }
  } else {
    write("cur_scale", 1.0), write("dynamic", false);
  }
  if (dynamic) {
    write("raise_error_at_min_scale", true);
    pickle.text("dtype"), pickle.global("torch", "float16");  // the one that is scaled
  }
  pickle.set_items_to_mark(), pickle.build();
}

}  // namespace accelerate::checkpointing
