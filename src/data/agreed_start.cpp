#include "agreed_start.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/utils/archive.hpp"
#include "feeds.hpp"
#include "utils/raise.hpp"

namespace accelerate::data::detail {
namespace {

struct StartMessage {
  int64_t seed = 0, dataset_size = -1, num_batches = -1, count = 0, hash = 0;
  std::vector<int64_t> first = {};
  std::string failure = {};
  ACCELERATE_FIELDS(seed, dataset_size, num_batches, count, hash, first, failure)
};

std::string known_or_not(int64_t count) { return count < 0 ? "an unknown number of" : std::to_string(count); }

}  // namespace

int64_t agree_on_start(const PassStart& mine) {
  const StartMessage message{.seed = mine.seed,
                             .dataset_size = mine.dataset_size.value_or(-1),
                             .num_batches = mine.num_batches.value_or(-1),
                             .count = mine.order.count,
                             .hash = static_cast<int64_t>(mine.order.hash),
                             .first = mine.order.first,
                             .failure = mine.failed ? what_of(mine.failed) : ""};
  std::vector<StartMessage> all;
  for (const std::string& bytes : comm::all_gather_bytes(to_bytes(message)))
    all.push_back(from_bytes<StartMessage>(bytes));
  if (mine.failed) std::rethrow_exception(mine.failed);
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (!all[rank].failure.empty()) throw_reader_failed(static_cast<int64_t>(rank), all[rank].failure);
  const StartMessage& first = all.front();
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const StartMessage& other = all[rank];
    if (other.dataset_size != first.dataset_size)
      raise<ConfigError>(
          "DataLoader: the data set of rank 0 has {} samples and that of rank {} has {}, expected the same data set on "
          "all ranks because each reads its share of it; if every rank has data of its own already, don't prepare the "
          "loader",
          known_or_not(first.dataset_size), rank, known_or_not(other.dataset_size));
    if (other.num_batches != first.num_batches)
      raise<ConfigError>(
          "DataLoader: the sampler of rank 0 has {} batches and that of rank {} has {}, expected the same ones on all "
          "ranks because each takes its share of them; give the loader a sampler of the whole data set",
          known_or_not(first.num_batches), rank, known_or_not(other.num_batches));
    if (other.count != first.count || other.hash != first.hash)
      raise<ConfigError>(
          "DataLoader: the samplers of ranks 0 and {} give different orders, which begin with [{}] and [{}], expected "
          "the same order on all ranks because each reads its share of it, else samples are read twice or never; draw "
          "it from generator(), which ranks share when random() says true and rng_types has RNGType::generator, or "
          "from a seed that is the same everywhere",
          rank, fmt::join(first.first, ", "), fmt::join(other.first, ", "));
  }
  return first.seed;
}

}  // namespace accelerate::data::detail
