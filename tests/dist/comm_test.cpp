// Collectives over real processes: every operation x dtype x structure, and what ranks are told when they don't agree.
#include <accelerate/comm.hpp>
#include <accelerate/state.hpp>
#include <accelerate/utils/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <limits>
#include <set>
#include <thread>

#include "accelerate/comm/comms_log.hpp"
#include "comm/comms_log.hpp"
#include "comm/group.hpp"
#include "comm/shared_memory.hpp"
#include "comm/watchdog.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

using namespace accelerate;
using support::rank;
using support::world_size;
using testing::HasSubstr;

using support::message_of;

namespace {

const at::ScalarType kDtypes[] = {at::kBool,  at::kByte,   at::kChar,         at::kShort,
                                  at::kInt,   at::kLong,   at::kHalf,         at::kBFloat16,
                                  at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};

/// The values of rank r: small whole numbers, exact in every dtype, different on each rank.
torch::Tensor sample(int64_t r, at::ScalarType dtype) {
  const auto numbers = torch::arange(6, torch::kLong).add(r).view({2, 3});
  return dtype == at::kBool ? numbers.remainder(3).eq(0) : numbers.to(dtype);
}

bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.equal(b);
}

struct Inner {
  torch::Tensor mask;
  std::optional<torch::Tensor> maybe;
  ACCELERATE_FIELDS(mask, maybe)
};
struct Batch {
  torch::Tensor ids;
  std::vector<Inner> parts;
  std::map<std::string, torch::Tensor> extra;
  std::string text;
  int64_t number = 0;
  ACCELERATE_FIELDS(ids, parts, extra, text, number)
};

Batch batch_of(int64_t r) {
  return {.ids = torch::full({1, 2}, r),
          .parts = {{torch::full({1}, r + 10), std::nullopt}, {torch::full({1}, r + 20), torch::full({1}, r + 30)}},
          .extra = {{"a", torch::full({1}, r + 40)}},
          .text = "t",
          .number = r};
}

struct Note {
  std::string text;
  std::vector<double> values;
  torch::Tensor tensor;
  std::map<int64_t, std::pair<bool, int32_t>> table;
  ACCELERATE_FIELDS(text, values, tensor, table)
};

}  // namespace

RANKS_TEST(Comm, EveryOperationOnEveryDtype, 2, 3) {
  const PartialState state;
  const int64_t n = world_size();
  EXPECT_EQ(state.num_processes(), n);
  EXPECT_EQ(state.process_index(), rank());
  for (const auto dtype : kDtypes) {
    SCOPED_TRACE(at::toString(dtype));
    std::vector<torch::Tensor> all;
    for (int64_t r = 0; r < n; ++r) all.push_back(sample(r, dtype));
    const auto mine = sample(rank(), dtype), copy = mine.clone();

    EXPECT_TRUE(same(gather(mine), torch::cat(all)));
    for (int64_t from = 0; from < n; ++from) EXPECT_TRUE(same(broadcast(mine, from), all[static_cast<size_t>(from)]));
    const auto sum = torch::stack(all).sum(0);
    EXPECT_TRUE(same(reduce(mine, Reduction::sum), sum.to(dtype)));
    EXPECT_TRUE(same(reduce(mine, Reduction::none), sum.to(dtype)));
    // The mean of whole numbers is a fraction: floating types keep their dtype, whole ones become fp32.
    const auto mean = reduce(mine, Reduction::mean);
    EXPECT_TRUE(torch::allclose(mean.to(at::kComplexDouble), sum.to(at::kComplexDouble) / n, 1e-2, 1e-6));
    EXPECT_EQ(mean.scalar_type(), at::isFloatingType(dtype) || at::isComplexType(dtype) ? dtype : at::kFloat);
    if (!at::isComplexType(dtype)) {
      EXPECT_TRUE(same(reduce(mine, Reduction::max), std::get<0>(torch::stack(all).to(at::kDouble).max(0)).to(dtype)));
    }
    EXPECT_TRUE(same(mine, copy)) << "a collective changed its input";
  }
  EXPECT_TRUE(torch::equal(reduce(torch::ones({2}), "sum", 0.5), torch::full({2}, 0.5 * static_cast<double>(n))));
  EXPECT_THROW(reduce(torch::ones({2}), "median"), ConfigError);
}

// Whichever rank has it, and whatever the others have.
RANKS_TEST(Comm, AMaximumWithNaNIsNaN, 2, 3, 5) {
  const PartialState state;
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble})
    for (int64_t with = 0; with < world_size(); ++with) {
      auto mine = torch::tensor({1.0, 2.0, -3.0}).add(static_cast<double>(rank())).to(dtype);
      if (rank() == with) mine[1] = std::numeric_limits<double>::quiet_NaN();
      const auto largest = reduce(mine, "max").to(at::kDouble);
      const auto top = static_cast<double>(world_size() - 1);
      EXPECT_EQ(largest[0].item<double>(), 1.0 + top);
      EXPECT_TRUE(std::isnan(largest[1].item<double>())) << "NaN on rank " << with << " of " << at::toString(dtype);
      EXPECT_EQ(largest[2].item<double>(), -3.0 + top);
    }
}

RANKS_TEST(Comm, HalfPrecisionIsSummedInFull, 2, 3, 5) {
  const PartialState state;
  const auto n = static_cast<double>(world_size());
  const auto large = torch::full({2, 3}, 60000, at::kHalf).t();
  EXPECT_TRUE(same(reduce(large, Reduction::mean), large));
  EXPECT_TRUE(same(reduce(large, Reduction::sum, 1 / n), large)) << "scaled";
  // 256 and so many ones: bf16 has no number between 256 and 258.
  const auto one = torch::full({}, rank() == 0 ? 256 : 1, at::kBFloat16);
  EXPECT_TRUE(same(reduce(one, Reduction::sum), torch::full({}, 255 + n, at::kBFloat16)));
}

RANKS_TEST(Comm, ConjugatedAndNegatedTensorsHaveTheirValues, 2) {
  const PartialState state;
  const auto x = torch::complex(torch::ones({2}), torch::full({2}, 2.0));
  const auto conj = x.conj(), negative = torch::imag(conj);
  ASSERT_TRUE(conj.is_conj() && negative.is_neg());
  for (const auto& tensor : {conj, negative}) {
    const auto expected = tensor.clone().resolve_conj().resolve_neg();
    EXPECT_TRUE(gather(tensor).equal(torch::cat({expected, expected})));
    EXPECT_TRUE(gather_object(std::vector<torch::Tensor>{tensor})[1].equal(expected));
  }
}

RANKS_TEST(Comm, ShapesThatAreSpecial, 2, 3) {
  const PartialState state;
  const int64_t n = world_size();
  EXPECT_TRUE(same(gather(torch::tensor(rank())), torch::arange(n)));  // a scalar counts as one row
  EXPECT_EQ(broadcast(torch::tensor(rank() + 5), n - 1).item<int64_t>(), n + 4);
  EXPECT_EQ(broadcast(torch::tensor(1.0)).dim(), 0);
  EXPECT_EQ(reduce(torch::tensor(2.0), Reduction::sum).item<double>(), 2.0 * static_cast<double>(n));

  EXPECT_EQ(gather(torch::empty({0, 3})).sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(gather(torch::empty({2, 0})).sizes(), (std::vector<int64_t>{2 * n, 0}));
  EXPECT_EQ(broadcast(torch::empty({0})).numel(), 0);
  EXPECT_EQ(reduce(torch::empty({0}), Reduction::sum).numel(), 0);

  const auto transposed = torch::arange(6).view({2, 3}).t() + 100 * rank();
  ASSERT_FALSE(transposed.is_contiguous());
  const auto gathered = gather(transposed);
  for (int64_t r = 0; r < n; ++r)
    EXPECT_TRUE(gathered.slice(0, 3 * r, 3 * r + 3).equal(torch::arange(6).view({2, 3}).t() + 100 * r));
  EXPECT_TRUE(broadcast(transposed, 1).equal(torch::arange(6).view({2, 3}).t() + 100));
  EXPECT_TRUE(reduce(transposed, Reduction::sum).equal(torch::arange(6).view({2, 3}).t() * n + 50 * n * (n - 1)));
  EXPECT_TRUE(
      gather(torch::arange(20).slice(0, 1, 20, 6) + rank()).slice(0, 0, 4).equal(torch::arange(20).slice(0, 1, 20, 6)));
  EXPECT_FALSE(gather(torch::ones({1}, torch::requires_grad())).requires_grad());

  // Several thousand small ones in a row: order alone pairs them up.
  for (int64_t i = 0; i < 300; ++i)
    ASSERT_EQ(reduce(torch::full({1}, i + rank()), Reduction::max).item<int64_t>(), i + n - 1);
}

RANKS_TEST(Comm, NestedBatches, 2) {
  const PartialState state;
  const Batch all = gather(batch_of(rank()));
  EXPECT_TRUE(all.ids.equal(torch::tensor({{0, 0}, {1, 1}})));
  EXPECT_TRUE(all.parts[0].mask.equal(torch::tensor({10, 11})));
  EXPECT_FALSE(all.parts[0].maybe);
  EXPECT_TRUE(all.parts[1].maybe->equal(torch::tensor({30, 31})));
  EXPECT_TRUE(all.extra.at("a").equal(torch::tensor({40, 41})));
  EXPECT_EQ(all.text, "t");
  EXPECT_EQ(all.number, rank());  // no tensor: as it was

  const auto [first, second] =
      broadcast(std::make_tuple(torch::tensor({rank()}), std::vector<torch::Tensor>{torch::tensor({rank() + 7})}), 1);
  EXPECT_EQ(first.item<int64_t>(), 1);
  EXPECT_EQ(second[0].item<int64_t>(), 8);
  const std::unordered_map<std::string, torch::Tensor> table{
      {"x", torch::ones({1})}, {"y", torch::ones({1}) * 2}, {"z", torch::ones({1}) * 3}};
  const auto sums = reduce(table, Reduction::sum);
  EXPECT_EQ(sums.at("y").item<float>(), 4);
  EXPECT_EQ(sums.at("z").item<float>(), 6);

  // TorchScript models return such values.
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("pair", c10::ivalue::Tuple::create(torch::tensor({rank()}), std::string("text")));
  dict.insert("list", std::vector<torch::Tensor>{torch::tensor({rank() * 2})});
  const auto gathered = gather(c10::IValue(dict)).toGenericDict();
  EXPECT_TRUE(gathered.at("pair").toTupleRef().elements()[0].toTensor().equal(torch::tensor({0, 1})));
  EXPECT_EQ(gathered.at("pair").toTupleRef().elements()[1].toStringRef(), "text");
  EXPECT_TRUE(gathered.at("list").toListRef()[0].toTensor().equal(torch::tensor({0, 2})));
}

RANKS_TEST(Comm, Objects, 2, 3) {
  const PartialState state;
  const int64_t n = world_size();
  // Lists of different lengths: rank r gives r items.
  std::vector<std::string> words;
  for (int64_t i = 0; i < rank(); ++i)
    words.push_back(std::string(static_cast<size_t>(1 + 1000 * rank()), static_cast<char>('a' + i)));
  const auto all = gather_object(words);
  ASSERT_EQ(all.size(), static_cast<size_t>(n * (n - 1) / 2));
  size_t at = 0;
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < r; ++i)
      EXPECT_EQ(all[at++], std::string(static_cast<size_t>(1 + 1000 * r), static_cast<char>('a' + i)));

  const Note mine{.text = "rank " + std::to_string(rank()),
                  .values = {0.5, static_cast<double>(rank())},
                  .tensor = torch::arange(rank() + 1).to(torch::kHalf),
                  .table = {{-1, {true, 7}}, {rank(), {false, 8}}}};
  const auto notes = gather_object(std::vector<Note>{mine});
  for (int64_t r = 0; r < n; ++r) {
    const auto& note = notes.at(static_cast<size_t>(r));
    EXPECT_EQ(note.text, "rank " + std::to_string(r));
    EXPECT_EQ(note.values, (std::vector<double>{0.5, static_cast<double>(r)}));
    EXPECT_TRUE(same(note.tensor, torch::arange(r + 1).to(torch::kHalf)));
    EXPECT_EQ(note.table.at(-1), std::make_pair(true, 7));
    EXPECT_EQ(note.table.at(r), std::make_pair(false, 8));
  }

  std::vector<Note> list{mine, {}};
  broadcast_object_list(list, n - 1);
  EXPECT_EQ(list[0].text, "rank " + std::to_string(n - 1));
  EXPECT_FALSE(list[1].tensor.defined());
  std::vector<c10::IValue> values{c10::IValue(rank()), c10::IValue("x"), c10::IValue(),
                                  c10::IValue(torch::ones({2}) * rank())};
  broadcast_object_list(values, 1);
  EXPECT_EQ(values[0].toInt(), 1);
  EXPECT_EQ(values[1].toStringRef(), "x");
  EXPECT_TRUE(values[2].isNone());
  EXPECT_TRUE(values[3].toTensor().equal(torch::ones({2})));
  EXPECT_EQ(gather_object(std::vector<bool>{rank() == 1}),
            (n == 2 ? std::vector<bool>{false, true} : std::vector<bool>{false, true, false}));
  EXPECT_TRUE(gather_object(std::vector<int64_t>{}).empty());
}

// Short texts travel with what ranks tell each other in front of an operation: 104 bytes by sockets, 16,352 in shared
// memory, which takes 16,376 at most, and is there after the first 32 messages: between the two of a long text, too.
TEST(Comm, TextsOfAnyLength) {
  if (!support::is_rank()) {
    for (const int64_t ranks : {1, 2, 3})
      for (const char* shared : {"1", "0"})
        for (const char* first : {"0", "1"})
          support::expect_ranks_pass(
              "Comm.TextsOfAnyLength",
              {.world_size = ranks, .env = {{"ACCELERATE_SHARED_MEMORY", shared}, {"FIRST", first}}});
    return;
  }
  const PartialState state;
  if (std::string(std::getenv("FIRST")) == "1") comm::barrier();
  for (int64_t i = 0; i < 40; ++i) {
    const std::string text(1000, static_cast<char>('a' + i % 26));
    for (const auto& theirs : comm::all_gather_bytes(text)) ASSERT_EQ(theirs, text) << i;
  }
  for (const int64_t length : {0, 1, 103, 104, 105, 128, 16351, 16352, 16353, 16376, 16377, 100'000})
    for (const bool alike : {true, false}) {
      SCOPED_TRACE(length);
      const auto of_rank = [&](int64_t of) {
        const int64_t own = alike || of == world_size() - 1 ? length : 7 * of;
        return std::string(static_cast<size_t>(own), static_cast<char>('a' + of));
      };
      const auto all = comm::all_gather_bytes(of_rank(rank()));
      ASSERT_EQ(all.size(), static_cast<size_t>(world_size()));
      for (int64_t of = 0; of < world_size(); ++of) EXPECT_EQ(all[static_cast<size_t>(of)], of_rank(of));
      for (int64_t from = 0; from < world_size(); ++from)
        EXPECT_EQ(comm::broadcast_bytes(of_rank(rank()), from), of_rank(from));
    }
  if (world_size() == 1) return;
  // One message for a short text, two for a long one.
  const auto messages_of = [](const std::function<void()>& f) {
    comm::start_comms_log({});
    f();
    comm::stop_comms_log();
    int64_t count = 0;
    for (const auto& record : comm::comms_records()) count += record.count;
    return count;
  };
  for (const bool is_long : {false, true}) {
    const std::string text(is_long ? 100'000 : 100, 'a');
    EXPECT_EQ(messages_of([&] { comm::all_gather_bytes(text); }), is_long ? 2 : 1);
    EXPECT_EQ(messages_of([&] { comm::broadcast_bytes(text, 0); }), is_long ? 2 : 1);
  }
}

RANKS_TEST(Comm, PadAcrossProcesses, 2, 3) {
  const PartialState state;
  const int64_t n = world_size();
  const auto mine = torch::ones({rank() + 1, 2}) * (rank() + 1);
  const auto padded = pad_across_processes(mine, 0, -1);
  EXPECT_EQ(padded.sizes(), (std::vector<int64_t>{n, 2}));
  EXPECT_TRUE(padded.slice(0, 0, rank() + 1).equal(mine));
  EXPECT_TRUE(padded.slice(0, rank() + 1).eq(-1).all().item<bool>());
  const auto first = pad_across_processes(mine, {.dim = 0, .pad_index = 9, .pad_first = true});
  EXPECT_TRUE(first.slice(0, n - rank() - 1).equal(mine));
  EXPECT_TRUE(first.slice(0, 0, n - rank() - 1).eq(9).all().item<bool>());
  EXPECT_EQ(pad_across_processes(mine.t(), -1).sizes(), (std::vector<int64_t>{2, n}));
  EXPECT_TRUE(pad_across_processes(mine, 5).equal(mine));  // no such dimension
  EXPECT_TRUE(pad_across_processes(torch::tensor(3), 0).equal(torch::tensor(3)));
  EXPECT_EQ(pad_across_processes(torch::ones({rank()}, torch::kBool)).scalar_type(), torch::kBool);  // none on rank 0
  EXPECT_EQ(gather(pad_across_processes(batch_of(rank()))).ids.size(0), n);
}

TEST(Comm, Alone) {
  if (support::is_rank()) return;
  const auto tensor = torch::arange(3);
  EXPECT_TRUE(gather(tensor).equal(tensor));
  EXPECT_TRUE(broadcast(tensor).equal(tensor));
  EXPECT_TRUE(reduce(tensor, Reduction::mean).equal(tensor));
  EXPECT_TRUE(reduce(tensor, Reduction::sum, 2.0).equal(tensor * 2));
  EXPECT_TRUE(pad_across_processes(tensor).equal(tensor));
  EXPECT_EQ(gather_object(std::vector<int>{1, 2}), (std::vector<int>{1, 2}));
  std::vector<std::string> list{"a"};
  EXPECT_EQ(broadcast_object_list(list)[0], "a");
  comm::barrier();
  // One of several that never joined would compute something else than asked for.
  ::setenv("WORLD_SIZE", "2", 1);
  EXPECT_THAT(message_of<ConfigError>([&] { gather(tensor); }), HasSubstr("construct an Accelerator"));
  ::unsetenv("WORLD_SIZE");
}

TEST(Comm, DebugModeListsTheShapesOfAllRanks) {
  if (!support::is_rank()) {
    support::expect_ranks_pass("Comm.DebugModeListsTheShapesOfAllRanks",
                               {.world_size = 3, .env = {{"ACCELERATE_DEBUG_MODE", "1"}}});
    return;
  }
  const PartialState state;
  ASSERT_TRUE(state.debug());
  const std::tuple<torch::Tensor, torch::Tensor> uneven{torch::ones({2, 3}), torch::ones({rank() == 1 ? 4 : 5})};
  EXPECT_THAT(message_of<DistributedOperationException>([&] { gather(uneven); }),
              HasSubstr("Process 1: gather of [2, 3] Float cpu, [4] Float cpu"));
  // Padding checks the other dimensions only.
  EXPECT_EQ(pad_across_processes(torch::ones({rank(), 2})).size(0), 2);
  EXPECT_THAT(message_of<DistributedOperationException>([] {
                pad_across_processes(torch::ones({2, rank() + 1}));
              }),
              HasSubstr("Process 1: pad_across_processes along dimension 0 of [*, 2] Float cpu"));
}

RANKS_TEST(Comm, WhatDiffersBetweenRanksIsListedOnAllOfThem, 2, 3) {
  const PartialState state;
  ASSERT_FALSE(state.debug());
  const int64_t n = world_size();
  const bool odd = rank() == 1;
  const auto expect = [&](const char* operation, const std::string& rank_0, const std::string& rank_1,
                          const std::function<void()>& call) {
    SCOPED_TRACE(operation);
    const auto text = message_of<CommError>(call);
    EXPECT_THAT(text, HasSubstr("Process 0: " + rank_0 + "\n"));
    EXPECT_THAT(text, HasSubstr("Process 1: " + rank_1 + "\n"));
    if (n == 3) {
      EXPECT_THAT(text, HasSubstr("Process 2: " + rank_0 + "\n"));
    }
    EXPECT_THAT(text, HasSubstr(std::string("Operation: `") + operation + "`"));
    ASSERT_TRUE(gather(torch::tensor({rank()})).equal(torch::arange(n))) << "the group is not as good as before";
  };
  const std::tuple<torch::Tensor, torch::Tensor> uneven{torch::ones({2, 3}), torch::ones({odd ? 4 : 5})};
  const std::string even_text = " of [2, 3] Float cpu, [5] Float cpu", odd_text = " of [2, 3] Float cpu, [4] Float cpu";
  expect("gather", "gather" + even_text, "gather" + odd_text, [&] { gather(uneven); });
  expect("broadcast", "broadcast from rank 0" + even_text, "broadcast from rank 0" + odd_text,
         [&] { broadcast(uneven); });
  expect("reduce", "reduce mean" + even_text, "reduce mean" + odd_text, [&] { reduce(uneven); });
  // Dtypes of one size, devices, numbers of tensors and of dimensions, and what an operation is told.
  expect("gather", "gather of [2] Float cpu", "gather of [2] Int cpu",
         [&] { gather(torch::ones({2}, odd ? torch::kInt : torch::kFloat)); });
  expect("reduce", "reduce sum of [2] Float cpu", "reduce sum of [2] Float meta",
         [&] { reduce(torch::ones({2}, odd ? torch::kMeta : torch::kCPU), Reduction::sum); });
  expect("gather", "gather of [1] Float cpu", "gather of [1] Float cpu, [1] Float cpu",
         [&] { gather(std::vector<torch::Tensor>(odd ? 2 : 1, torch::ones({1}))); });
  expect("gather", "gather of [1] Float cpu", "gather of no tensors",
         [&] { gather(odd ? std::optional<torch::Tensor>() : torch::ones({1})); });
  expect("gather", "gather of [] Float cpu", "gather of undefined",
         [&] { gather(odd ? torch::Tensor() : torch::tensor(1.0F)); });
  expect("broadcast", "broadcast from rank 0 of [2] Float cpu", "broadcast from rank 1 of [2] Float cpu",
         [&] { broadcast(torch::ones({2}), odd ? 1 : 0); });
  expect("reduce", "reduce sum of [2] Float cpu", "reduce max of [2] Float cpu",
         [&] { reduce(torch::ones({2}), odd ? "max" : "sum"); });
  expect("pad_across_processes", "pad_across_processes along dimension 0 of [*, *] Float cpu",
         "pad_across_processes along dimension 0 of [*] Float cpu", [&] {
           pad_across_processes(odd ? torch::ones({2}) : torch::ones({2, 2}));
         });
  expect("gather", "gather of [2] Float cpu", "gather of [3] Float cpu",
         [&] { comm::all_gather(torch::ones({odd ? 3 : 2})); });
  // Ways that part.
  const std::string own = odd ? "reduce" : "gather";
  const auto parted = message_of<CommError>([&] { odd ? reduce(torch::ones({2})) : gather(torch::ones({2})); });
  EXPECT_THAT(parted, AllOf(HasSubstr(own + ": the ranks are about to do different things"),
                            HasSubstr("Process 0: gather of [2] Float cpu"),
                            HasSubstr("Process 1: reduce mean of [2] Float cpu")));
  EXPECT_THAT(message_of<CommError>([&] {
                if (odd) gather_object(std::vector<std::string>{"a", "b"});
                else state.wait_for_everyone();
              }),
              AllOf(HasSubstr("Process 0: barrier"), HasSubstr("Process 1: gather_object")));
  // Along two dimensions, one after the other.
  const auto both = pad_across_processes(pad_across_processes(torch::ones({rank() + 1, 2 * rank() + 1}), 0), 1);
  EXPECT_EQ(both.sizes(), (std::vector<int64_t>{n, 2 * n - 1}));
  EXPECT_EQ(gather(both).sum().item<double>(), n == 2 ? 7 : 22);
}

/// For groups where somebody never comes. It bounds their meeting, too, for which a busy machine needs some seconds.
constexpr std::chrono::seconds kTimeout(6);

RANKS_TEST(Comm, DifferentCollectivesEndInAnErrorThatNamesThem, 2) {
  const PartialState state({.process_group = {.timeout = kTimeout}});
  comm::barrier();
  const auto text = message_of<CommError>([] {
    std::vector<std::string> list{"a"};
    if (rank() == 0) gather(torch::ones({4}));
    else broadcast_object_list(list, 1);
  });
  EXPECT_THAT(text, HasSubstr("Process 0: gather of [4]"));
  EXPECT_THAT(text, HasSubstr("Process 1: broadcast of objects from rank 1"));
  std::fprintf(stderr, "%s\n", text.c_str());
}

/// Waits until so many ranks have said that they gave up, and until that has reached this rank's group.
void come_after(const std::string& what, int64_t num_ranks) {
  EXPECT_TRUE(support::heard(what, num_ranks, std::chrono::seconds(60)));
  std::this_thread::sleep_for(std::chrono::seconds(1));
}

RANKS_TEST(Comm, TimeoutNamesWhoIsLateAndWhatItDidLast, 3) {
  const PartialState state({.process_group = {.timeout = kTimeout}});
  reduce(torch::ones({1}));
  if (rank() == 1) come_after("too late", 2);
  const auto text = message_of<CommError>([] { gather(torch::ones({1})); });
  if (rank() == 1) {
    EXPECT_THAT(text, HasSubstr("not usable any more")) << "the group was known to be broken";
  } else {
    EXPECT_THAT(text, HasSubstr("rank 1 has not arrived: it came out of collective 2 (reduce)")) << text;
    EXPECT_THAT(text,
                HasSubstr("gather (collective 3 of the group of all 3 ranks, gloo) on rank " + std::to_string(rank())));
    support::say("too late");
  }
}

/// An `if` on the rank around a collective: known as soon as both wait, not when the half hour of the limit is over.
RANKS_TEST(Comm, RanksInDifferentCollectivesEndAtOnce, 2, 3) {
  const PartialState state;
  const auto group = comm::world_group();
  auto one = torch::ones({1});
  group->all_reduce_(one, Reduction::sum);
  const auto text = message_of<CommError>([&] {
    if (rank() == 0) group->all_gather(one);
    else group->all_reduce_(one, Reduction::sum);
  });
  EXPECT_THAT(text, AllOf(HasSubstr("is elsewhere: its collective "), HasSubstr("same order"))) << text;
}

/// A rank that is late, however often it is looked at, is no reason to end.
RANKS_TEST(Comm, WhoIsLateIsWaitedFor, 3) {
  const PartialState state;
  for (int64_t late = 0; late < 3; ++late) {
    if (rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    EXPECT_EQ(gather(torch::ones({1})).numel(), 3);
  }
}

/// The first rank that leaves must not meet the others in the group that they have not left yet.
RANKS_TEST(Comm, ASecondGroupWaitsForThoseWhoAreStillInTheFirst, 3) {
  for (int64_t time = 0; time < 6; ++time) {
    {
      const PartialState state;
      EXPECT_EQ(reduce(torch::full({1}, time)).item<int64_t>(), time);
    }
    if (rank() == time % 3) std::this_thread::sleep_for(std::chrono::milliseconds(60));
    PartialState::reset();
  }
}

RANKS_TEST(Comm, WhatCannotBeSentIsRefusedOnTheSpot, 2) {
  const PartialState state;
  const auto elsewhere = torch::empty({2}, torch::kMeta);
  EXPECT_THAT(message_of<ShapeError>([&] { gather(elsewhere); }), HasSubstr("found a tensor on meta"));
  EXPECT_THROW(broadcast(elsewhere), ShapeError);
  EXPECT_THROW(reduce(elsewhere), ShapeError);
  EXPECT_THAT(message_of<ConfigError>([&] { broadcast(torch::ones({2}), 2); }), HasSubstr("0 to 1"));
  EXPECT_THAT(message_of<ShapeError>([&] { reduce(torch::ones({2}, at::kComplexFloat), Reduction::max); }),
              HasSubstr("ComplexFloat"));
  EXPECT_THAT(message_of<ShapeError>([&] { reduce(torch::zeros({2}, at::kFloat8_e4m3fn), Reduction::sum); }),
              HasSubstr("Float8"));
  EXPECT_EQ(gather(torch::ones({1})).size(0), 2);  // the group is as good as before
}

RANKS_TEST(Comm, GroupsWithinTheGroup, 4, 6) {
  const PartialState state;
  const auto world = comm::world_group();
  const int64_t width = world_size() / 2, row = rank() / width, column = rank() % width;
  const auto rows = world->split("row", [&](int64_t r) { return r / width; }),
             columns = world->split("column", [&](int64_t r) { return r % width; });
  EXPECT_EQ(rows->rank(), column);
  EXPECT_EQ(rows->world_size(), width);
  EXPECT_EQ(columns->rank(), row);
  EXPECT_EQ(columns->global_ranks(), (std::vector<int64_t>{column, column + width}));
  EXPECT_EQ(rows->all_gather(torch::tensor({rank()})).sum().item<int64_t>(),
            width * row * width + width * (width - 1) / 2);
  EXPECT_EQ(columns->broadcast(torch::tensor({rank()}), 1).item<int64_t>(), column + width);
  // Sum over rows, then over columns: the sum of all.
  at::Tensor sum = torch::tensor({rank() + 1});
  rows->all_reduce_(sum, Reduction::sum);
  columns->all_reduce_(sum, Reduction::sum);
  EXPECT_EQ(sum.item<int64_t>(), world_size() * (world_size() + 1) / 2);
  EXPECT_EQ(comm::all_gather_bytes(*columns, std::to_string(rank())),
            (std::vector<std::string>{std::to_string(column), std::to_string(column + width)}));
  // The same again, and everybody: nothing new.
  EXPECT_EQ(world->split("row", [&](int64_t r) { return r / width; }), rows);
  EXPECT_EQ(world->split("all", [](int64_t) { return 7; }), world);
  // Within a group of the group, by color and not by rank; a group of one.
  const auto alone = rows->split("single", [](int64_t r) { return -r; });
  EXPECT_EQ(alone->global_ranks(), std::vector<int64_t>{rank()});
  EXPECT_TRUE(alone->all_gather(torch::tensor({5})).equal(torch::tensor({5})));
  // Each group finds shared memory of its own.
  const auto memory = comm::SharedMemory::create(columns, 64);
  ASSERT_TRUE(memory);
  memory->barrier("test");
  memory->data()[row] = static_cast<char>(1 + rank());
  memory->barrier("test");
  EXPECT_EQ(memory->data()[1 - row], 1 + column + (1 - row) * width);
  // Asynchronous operations of two groups at once.
  const at::Tensor a = torch::full({1000}, static_cast<float>(rank())), b = torch::full({1000}, 1.0F);
  const auto in_row = rows->all_reduce_async(a), in_column = columns->all_reduce_async(b);
  columns->wait("test", *in_column);
  rows->wait("test", *in_row);
  EXPECT_EQ(b[0].item<float>(), 2);
  EXPECT_EQ(a[0].item<float>(), static_cast<float>(width * row * width + width * (width - 1) / 2));
}

/// Rank 3 of 2 x 2 ranks is killed in a collective of its row; rank 2 waits for it there, 0 and 1 in their columns, by
/// c10d or in shared memory.
void killed_in_a_group(const char* shared, const std::string& name) {
  if (!support::is_rank()) {
    const auto results =
        support::run_test_in_ranks(name, {.world_size = 4, .env = {{"ACCELERATE_SHARED_MEMORY", shared}}});
    EXPECT_EQ(results[3].signal, SIGKILL);
    for (const size_t r : {size_t{0}, size_t{1}, size_t{2}}) EXPECT_EQ(results[r].exit_code, 0) << results[r].output;
    return;
  }
  const PartialState state;  // whose timeout comes after the deadline of the ranks
  const auto rows = comm::world_group()->split("row", [](int64_t r) { return r / 2; }),
             columns = comm::world_group()->split("column", [](int64_t r) { return r % 2; });
  const auto memory = comm::SharedMemory::create(columns, 64);
  const auto text = message_of<CommError>([&] {
    for (int i = 0;; ++i) {
      if (rank() == 3 && i == 20) ::kill(::getpid(), SIGKILL);
      rows->all_gather(torch::ones({4}));
      if (memory) memory->barrier("column");
      else columns->barrier();
    }
  });
  EXPECT_THAT(text, HasSubstr("rank 3"));
  EXPECT_THAT(text, testing::AnyOf(HasSubstr("of the row group of ranks"), HasSubstr("of the column group of ranks"),
                                   HasSubstr("not usable any more")));
}

TEST(Comm, ARankKilledInAGroupWithinTheGroupIsNamed) {
  killed_in_a_group("0", "Comm.ARankKilledInAGroupWithinTheGroupIsNamed");
}
TEST(Comm, ARankKilledInAGroupWithinTheGroupIsNamedInSharedMemory) {
  killed_in_a_group("1", "Comm.ARankKilledInAGroupWithinTheGroupIsNamedInSharedMemory");
}

RANKS_TEST(Comm, WhoWaitsInAGroupHearsWhereTheOthersAre, 4) {
  const PartialState state({.process_group = {.timeout = kTimeout}});
  const auto rows = comm::world_group()->split("row", [](int64_t r) { return r / 2; }),
             columns = comm::world_group()->split("column", [](int64_t r) { return r % 2; });
  rows->barrier();
  const auto text = message_of<CommError>([&] {
    if (rank() == 1) columns->barrier();  // rank 3 never comes
    else if (rank() == 0) rows->barrier();
    else come_after("given up", 2), rows->barrier();
  });
  support::say("given up");
  // The first rank that gives up tells the others.
  if (rank() > 1) {
    EXPECT_THAT(text, HasSubstr("not usable any more"));
  } else {
    EXPECT_THAT(
        text,
        testing::AnyOf(
            HasSubstr("rank 1 has not arrived: it is in collective 1 (barrier) of the column group of ranks 1, 3"),
            HasSubstr("rank 3 has not arrived: it came out of collective 0 (none)")))
        << text;
  }
}

/// An address of version 4 that is not loopback's, if the machine has one.
std::string outside_address() {
  ifaddrs* all = nullptr;
  std::string found;
  if (::getifaddrs(&all) != 0) return found;
  for (const ifaddrs* entry = all; entry && found.empty(); entry = entry->ifa_next) {
    if (!entry->ifa_addr || entry->ifa_addr->sa_family != AF_INET || !(entry->ifa_flags & IFF_UP) ||
        (entry->ifa_flags & IFF_LOOPBACK))
      continue;
    char text[INET_ADDRSTRLEN];
    found = ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof(text));
  }
  ::freeifaddrs(all);
  return found;
}

/// The addresses at which this process listens.
std::set<std::string> listening_at() {
  std::set<std::string> result;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    sockaddr_in own{};
    socklen_t length = sizeof(listens), own_length = sizeof(own);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || !listens ||
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_length) != 0 || own.sin_family != AF_INET)
      continue;
    char text[INET_ADDRSTRLEN];
    result.insert(::inet_ntop(AF_INET, &own.sin_addr, text, sizeof(text)));
  }
  return result;
}

// The name of a machine is often 127.0.1.1 in its own /etc/hosts, where no other machine finds it.
TEST(Comm, OnSeveralMachinesGlooTakesTheWayToTheMaster) {
  const auto outside = outside_address();
  if (outside.empty()) GTEST_SKIP() << "this machine has no address but loopback";
  if (!support::is_rank())
    return support::expect_ranks_pass("Comm.OnSeveralMachinesGlooTakesTheWayToTheMaster",
                                      {.world_size = 2, .env = {{"MASTER_ADDR", outside}}});
  const PartialState state;
  EXPECT_EQ(gather(torch::ones({1})).size(0), 2);
  EXPECT_THAT(listening_at(), testing::Contains(outside));
}

// Anybody who may write there can end the job, by a word that a rank has failed. The job is an ordinary user's, who may
// give the kernel fewer orders than root.
RANKS_TEST(Comm, OtherUsersOfTheMachineCannotWriteToTheStore, 2) {
  if (::getuid() != 0) {
    const PartialState state;  // only root can be somebody else
    return state.wait_for_everyone();
  }
  const auto becomes = [](uid_t user) {
    return ::setresgid(user, user, user) == 0 && ::setresuid(user, user, user) == 0;
  };
  int turn[2];
  ASSERT_EQ(::pipe(turn), 0);
  const pid_t stranger = rank() == 1 ? ::fork() : -1;
  if (stranger == 0) {
    char byte = 0;
    if (!becomes(65534) || ::read(turn[0], &byte, 1) != 1) ::_exit(1);
    int status = 0;
    // The guard, which hangs up, and what it stands before, at which a first caller may wait for an answer.
    for (const char* address : {"127.0.0.1", "127.0.0.2", "127.0.0.2"}) {
      const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in place{};
      place.sin_family = AF_INET;
      place.sin_port = htons(static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT"))));
      ::inet_pton(AF_INET, address, &place.sin_addr);
      const timeval limit{2, 0};
      ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
      ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
      if (::connect(fd, reinterpret_cast<const sockaddr*>(&place), sizeof(place)) != 0) continue;
      // c10d's greeting, and the question how many keys there are.
      const std::string question = std::string("\0\xce\xf7\x85\x3c", 5) + "\7";
      ::send(fd, question.data(), question.size(), MSG_NOSIGNAL);
      if (::recv(fd, &byte, 1, 0) > 0) status = 2;
    }
    ::_exit(status);
  }
  ASSERT_TRUE(becomes(54321));
  const PartialState state;
  if (rank() == 1) {
    ASSERT_EQ(::write(turn[1], "!", 1), 1);
    int status = 0;
    EXPECT_EQ(::waitpid(stranger, &status, 0), stranger);
    EXPECT_EQ(status, 0);
  }
  state.wait_for_everyone();
}

TEST(Comm, AWordInTheStoreThatNoRankWroteIsReported) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::promise<std::string> heard;
  comm::Watchdog watchdog(store, 1, 2, std::chrono::seconds(5),
                          {.status = [] { return comm::RankStatus{}; },
                           .on_peer_failure = [&](const std::string& text) { heard.set_value(text); }});
  store->set("watch/status/0", std::vector<uint8_t>{'x'});
  comm::StoreState state{};
  const auto answers = watchdog.ask_peers(std::chrono::milliseconds(500), state);
  EXPECT_EQ(state, comm::StoreState::answers);
  ASSERT_TRUE(answers[0]);
  EXPECT_THAT(answers[0]->note, HasSubstr("under watch/status/0 can't be read"));
  store->set("watch/failure", std::vector<uint8_t>{'y'});
  store->add("watch/events", 1);
  auto text = heard.get_future();
  ASSERT_EQ(text.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  EXPECT_THAT(text.get(), HasSubstr("under watch/failure can't be read"));
}

// A rank that answers questions while it fails hides that by no answer: peers that ask when it has gone learn why.
TEST(Comm, WhatARankSaidAsItFailedStays) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::atomic<int64_t> answers_begun{0};
  comm::Watchdog failing(
      store, 1, 2, std::chrono::seconds(5),
      {.status = [&] { return ++answers_begun, comm::RankStatus{}; }, .on_peer_failure = [](auto) {}});
  comm::Watchdog asking(store, 0, 2, std::chrono::seconds(5),
                        {.status = [] { return comm::RankStatus{}; }, .on_peer_failure = [](auto) {}});
  failing.announce_failure("the tokenizer has no vocabulary");
  const int64_t announced = answers_begun;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (answers_begun == announced && std::chrono::steady_clock::now() < end)  // it answers to its own word
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  ASSERT_GT(answers_begun, announced);
  failing.leave();
  comm::StoreState state{};
  const auto answers = asking.ask_peers(std::chrono::milliseconds(500), state);
  ASSERT_TRUE(answers[1]);
  EXPECT_EQ(answers[1]->note, "failed: the tokenizer has no vocabulary");
}

// Rank 0 may fail between the ranks' meeting and the first collective.
TEST(Comm, AStoreThatIsGoneWhenTheWatchdogStartsIsAnErrorWithItsRank) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  options.isServer = false;
  options.port = server->getPort();
  options.timeout = std::chrono::milliseconds(500);
  const auto client = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  server.reset();
  const auto text = message_of<CommError>([&] { comm::Watchdog(client, 2, 3, options.timeout, {}); });
  EXPECT_THAT(text, HasSubstr("rank 2 could not connect to rank 0's store for a second time"));
  EXPECT_THAT(text, testing::Not(HasSubstr("frame #")));
}
