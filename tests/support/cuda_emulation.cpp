#include <c10/util/Half.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_emulation.hpp"

namespace accelerate::codes::cuda {

struct Place {
  unsigned x = 0;
};
inline Place threadIdx, blockIdx, blockDim;

/// One block.
class Block {
 public:
  using Body = void (*)(const Arguments&);

  /// @throws std::logic_error where threads don't all come to the same barrier, and a GPU might hang
  void run(Body body, const Arguments& arguments, unsigned threads) {
    body_ = body, arguments_ = &arguments;
    fibers_.resize(std::max<size_t>(fibers_.size(), threads));
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = fibers_[i];
      fiber.stack.resize(kStack);
      fiber.waits = 0;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::start, 0);
    }
    for (size_t done = 0; done < threads;) {
      done = 0;
      for (current_ = 0; current_ < threads; ++current_) {
        Fiber& fiber = fibers_[current_];
        fiber.barrier = nullptr;
        threadIdx.x = current_;
        swapcontext(&scheduler_, &fiber.context);
        done += fiber.barrier == nullptr;
        if (fiber.barrier != fibers_[0].barrier) throw std::logic_error("threads of a block have parted");
      }
    }
  }

  /// The current thread waits here until all have come to this barrier.
  void wait(const char* barrier) {
    Fiber& fiber = fibers_[current_];
    ++fiber.waits;
    fiber.barrier = barrier;
    swapcontext(&fiber.context, &scheduler_);
  }

  /// The sum over the current warp, in the order of a GPU's exchanges.
  float warp_sum(float value) {
    std::vector<float>& given = given_[fibers_[current_].waits % 2];  // the next sum's come while these are read
    given.resize(fibers_.size());
    const unsigned thread = current_, first = thread / 32 * 32;
    given[thread] = value;
    wait("warp_sum");
    std::array<float, 32> sums;
    for (unsigned i = 0; i < 32; ++i) sums[i] = given[first + i];
    for (unsigned distance = 16; distance > 0; distance /= 2) {
      const std::array<float, 32> before = sums;
      for (unsigned i = 0; i < 32; ++i) sums[i] = before[i] + before[i ^ distance];
    }
    return sums[thread % 32];
  }

  static Block& current() {
    static auto& only = *new Block;
    return only;
  }

 private:
  static constexpr size_t kStack = 1 << 17;
  struct Fiber {
    ucontext_t context{};
    std::vector<char> stack;
    const char* barrier = nullptr;  ///< null: it has ended
    size_t waits = 0;
  };

  static void start() {
    const Block& block = current();
    block.body_(*block.arguments_);
  }

  std::vector<Fiber> fibers_;
  ucontext_t scheduler_{};
  unsigned current_ = 0;
  Body body_ = nullptr;
  const Arguments* arguments_ = nullptr;
  std::array<std::vector<float>, 2> given_;
};

inline float float_of(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned bits_of(float value) { return std::bit_cast<unsigned>(value); }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float half_to_float(unsigned short half) { return c10::Half(half, c10::Half::from_bits()); }
inline unsigned short float_to_half(float value) { return c10::Half(value).x; }
inline float warp_sum(float value) { return Block::current().warp_sum(value); }
inline void __syncthreads() { Block::current().wait("__syncthreads"); }

}  // namespace accelerate::codes::cuda

#define __shared__ static  // blocks run one after the other
#define ACCELERATE_UNROLL
#include "codes/cuda/kernels.cuh"
#undef __shared__
#undef ACCELERATE_UNROLL

namespace accelerate::codes::cuda {
namespace {

const std::map<std::string, Block::Body>& emulated_kernels() {
  static const auto& kernels = *new std::map<std::string, Block::Body>([] {
    std::map<std::string, Block::Body> all;
#define ACCELERATE_KERNELS_ON(E, T)                    \
  all["decode<" #E "," #T ">"] = &decode<E, T>;        \
  all["product<" #E "," #T ",1>"] = &product<E, T, 1>; \
  all["product<" #E "," #T ",3>"] = &product<E, T, 3>; \
  all["product<" #E "," #T ",8>"] = &product<E, T, 8>;
#define ACCELERATE_KERNELS_OF(E)  \
  ACCELERATE_KERNELS_ON(E, Float) \
  ACCELERATE_KERNELS_ON(E, Half)  \
  ACCELERATE_KERNELS_ON(E, BFloat16)
#define ACCELERATE_KERNELS_OF_ANY(E)                       \
  ACCELERATE_KERNELS_OF(E)                                 \
  all["decode_any<" #E ",Float>"] = &decode_any<E, Float>; \
  all["decode_any<" #E ",Half>"] = &decode_any<E, Half>;   \
  all["decode_any<" #E ",BFloat16>"] = &decode_any<E, BFloat16>;
    ACCELERATE_KERNELS_OF_ANY(Int8Rowwise)
    ACCELERATE_KERNELS_OF_ANY(FourBit)
    ACCELERATE_KERNELS_OF(Q4_0)
    ACCELERATE_KERNELS_OF(Q4_1)
    ACCELERATE_KERNELS_OF(Q5_0)
    ACCELERATE_KERNELS_OF(Q5_1)
    ACCELERATE_KERNELS_OF(Q8_0)
    ACCELERATE_KERNELS_OF(Q2_K)
    ACCELERATE_KERNELS_OF(Q3_K)
    ACCELERATE_KERNELS_OF(Q4_K)
    ACCELERATE_KERNELS_OF(Q5_K)
    ACCELERATE_KERNELS_OF(Q6_K)
#undef ACCELERATE_KERNELS_ON
#undef ACCELERATE_KERNELS_OF
#undef ACCELERATE_KERNELS_OF_ANY
    return all;
  }());
  return kernels;
}

}  // namespace

bool has_emulated(const std::string& kernel) { return emulated_kernels().contains(kernel); }

bool emulate(const Launch& launch, const c10::Device&) {
  const Block::Body body = emulated_kernels().at(launch.kernel);
  const Arguments& a = launch.arguments;
  const void* const result = launch.kernel.starts_with("decode_any") ? nullptr : a.to;
  for (const void* const memory : {static_cast<const void*>(a.w.data), a.x, result})
    if (std::bit_cast<uintptr_t>(memory) % 16 != 0) throw std::logic_error("a GPU would refuse this address");
  blockDim.x = launch.threads;
  for (blockIdx.x = 0; blockIdx.x < launch.blocks; ++blockIdx.x)
    Block::current().run(body, launch.arguments, launch.threads);
  return true;
}

}  // namespace accelerate::codes::cuda
