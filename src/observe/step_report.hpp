#pragma once

#include <cstdint>
#include <string_view>

namespace accelerate {

/// An optimizer's `steps`-th step is done. The one that steps most counts if there are several. Not a word once the
/// program calls report_step() itself.
void report_optimizer_step(int64_t steps, const void* optimizer);

/// Whether somebody watches.
bool is_monitored();
/// The program has logged a number. The first kMostLogged names count. Nothing when nobody watches.
void report_logged(std::string_view name, double value);
/// A model is used from now on: floating-point operations that each token takes in the forward, and in the backward.
/// The operations of several models add up.
void count_flops_per_token(double forward, double backward);
/// None is used any more.
void forget_flops_per_token();

}  // namespace accelerate
