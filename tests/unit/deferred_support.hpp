#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/residency/deferred.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"

namespace deferred_test {

using accelerate::init_empty_weights;
using accelerate::is_deferred;
using accelerate::materialize;
using accelerate::ModelRef;
using accelerate::NamedTensors;
using Module = std::shared_ptr<torch::nn::Module>;
using Build = std::function<Module()>;

constexpr uint64_t kSeed = 1234;

inline Module build_deferred(const Build& build, bool include_buffers = false) {
  auto scope = init_empty_weights({.include_buffers = include_buffers});
  return build();
}

/// The same bits, and all that makes up a tensor. NaN (uninitialised memory never is compared) equals itself.
inline void expect_same(const at::Tensor& a, const at::Tensor& b, const std::string& name) {
  ASSERT_FALSE(is_deferred(b)) << name;
  ASSERT_EQ(a.device(), b.device()) << name;
  ASSERT_EQ(a.scalar_type(), b.scalar_type()) << name;
  ASSERT_EQ(a.sizes(), b.sizes()) << name;
  EXPECT_EQ(a.strides(), b.strides()) << name;
  EXPECT_EQ(a.requires_grad(), b.requires_grad()) << name;
  EXPECT_EQ(a.is_leaf(), b.is_leaf()) << name;
  EXPECT_EQ(a.key_set(), b.key_set()) << name;
  EXPECT_TRUE(torch::equal(a, b)) << name << "\n" << a.flatten().slice(0, 0, 8) << "\n" << b.flatten().slice(0, 0, 8);
}

inline void expect_same(const Module& eager, const Module& deferred) {
  const NamedTensors a = ModelRef(eager).state(), b = ModelRef(deferred).state();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].first, b[i].first);
    expect_same(a[i].second, b[i].second, a[i].first);
  }
}

/// A module made of a lambda: `fill(*this)` registers what it likes.
struct Custom : torch::nn::Module {
  explicit Custom(const std::function<void(Custom&)>& fill) { fill(*this); }
  at::Tensor parameter(const std::string& name, at::Tensor tensor, bool requires_grad = true) {
    return register_parameter(name, std::move(tensor), requires_grad);
  }
  at::Tensor buffer(const std::string& name, at::Tensor tensor) { return register_buffer(name, std::move(tensor)); }
};
inline Build custom(std::function<void(Custom&)> fill) {
  return [fill = std::move(fill)] { return std::make_shared<Custom>(fill); };
}

}  // namespace deferred_test
