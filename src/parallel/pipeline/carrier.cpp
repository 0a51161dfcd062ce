#include "parallel/pipeline/carrier.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>

#include "utils/raise.hpp"

namespace accelerate::parallel::pipeline {
namespace {

constexpr size_t kMaxDims = 16;  // more than any operator of ATen's usual kernels takes

/// The bytes of a dense tensor as they lie in memory.
at::Tensor in_memory_order(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

}  // namespace

struct GroupCarrier::Announcement {
  int64_t call = 0, number = 0;
  int64_t ends = 0;  ///< no tensor follows: the sender has come to the end of its call
  int64_t dtype = 0, dims = 0;
  std::array<int64_t, kMaxDims> sizes{}, strides{};
  std::array<char, 64> label{};

  static Announcement of(int64_t call, int64_t number, const at::Tensor& tensor, const std::string& label) {
    Announcement result{
        .call = call, .number = number, .dtype = static_cast<int64_t>(tensor.scalar_type()), .dims = tensor.dim()};
    if (static_cast<size_t>(tensor.dim()) > kMaxDims)
      raise<ShapeError>("pipeline: found a tensor of {} dimensions to be sent, expected at most {}", tensor.dim(),
                        kMaxDims);
    std::copy(tensor.sizes().begin(), tensor.sizes().end(), result.sizes.begin());
    std::copy(tensor.strides().begin(), tensor.strides().end(), result.strides.begin());
    label.copy(result.label.data(), result.label.size() - 1);
    return result;
  }
  std::string text() const {
    if (ends) return "the end of call " + std::to_string(call) + ", after " + std::to_string(number) + " tensors";
    std::string shape;
    for (int64_t i = 0; i < dims && i < static_cast<int64_t>(kMaxDims); ++i)
      shape += (i ? ", " : "") + std::to_string(sizes[static_cast<size_t>(i)]);
    return "tensor " + std::to_string(number) + " of call " + std::to_string(call) + ", " +
           at::toString(static_cast<at::ScalarType>(dtype)) + " [" + shape + "] for " + label.data();
  }
  bool agrees_with(const Announcement& other) const {
    return call == other.call && number == other.number && ends == other.ends && dtype == other.dtype &&
           dims == other.dims && sizes == other.sizes && label == other.label;
  }
};

GroupCarrier::GroupCarrier(std::shared_ptr<comm::Group> group) : group_(std::move(group)) {}
GroupCarrier::~GroupCarrier() = default;

void GroupCarrier::announce(const Announcement& announcement, int64_t to) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(announcement))}, at::kByte);
  std::memcpy(bytes.data_ptr(), &announcement, sizeof(announcement));
  under_way_.push_back({nullptr, part_, group_->send(bytes.to(group_->device()), to)});
}

GroupCarrier::Announcement GroupCarrier::expect(int64_t from) {
  Announcement announcement;
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(announcement))},
                               at::TensorOptions().dtype(at::kByte).device(group_->device()));
  group_->receive_(bytes, from);
  bytes = bytes.cpu();
  std::memcpy(&announcement, bytes.data_ptr(), sizeof(announcement));
  announcement.label.back() = '\0';
  return announcement;
}

void GroupCarrier::differ(const Announcement& mine, const Announcement& theirs, int64_t from) {
  const std::string text = "pipeline: rank " + std::to_string(group_->rank()) + " expected from rank " +
                           std::to_string(from) + " " + mine.text() + "; found " + theirs.text() +
                           ". The ranks don't run the same program: their models, inputs that aren't tensors, or a "
                           "branch on a tensor's device, strides or values differ";
  group_->announce_failure(text);
  throw CommError(text);
}

void GroupCarrier::send(const at::Tensor& tensor, int64_t to, const std::string& label) {
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  announce(Announcement::of(call_, number_++, dense, label), to);
  ++sent;
  if (dense.numel() == 0) return;
  bytes_sent += static_cast<int64_t>(dense.nbytes());
  under_way_.push_back({dense.storage().unsafeGetStorageImpl(), part_, group_->send(in_memory_order(dense), to)});
}

at::Tensor GroupCarrier::receive(const at::Tensor& like, int64_t from, const std::string& label) {
  const Announcement mine = Announcement::of(call_, number_++, like, label);
  const Announcement theirs = expect(from);
  if (!mine.agrees_with(theirs)) differ(mine, theirs, from);
  const auto dims = static_cast<size_t>(theirs.dims);
  at::Tensor tensor = at::empty_strided({theirs.sizes.data(), dims}, {theirs.strides.data(), dims},
                                        like.options().device(group_->device()));
  ++received;
  if (tensor.numel() == 0) return tensor;
  bytes_received += static_cast<int64_t>(tensor.nbytes());
  at::Tensor memory = in_memory_order(tensor);
  group_->receive_(memory, from);
  return tensor;
}

void GroupCarrier::wait_for(Sent& sent) {
  if (sent.transfer) group_->wait(*std::exchange(sent.transfer, nullptr));
}

void GroupCarrier::before_write(const c10::StorageImpl& storage) {
  for (Sent& sent : under_way_)
    if (sent.storage == &storage) wait_for(sent);
}

void GroupCarrier::begin_call() {
  ++call_;
  number_ = part_ = sent = received = bytes_sent = bytes_received = 0;
}

void GroupCarrier::end_part() {
  ++part_;
  while (!under_way_.empty() && under_way_.front().part + group_->world_size() < part_) {
    wait_for(under_way_.front());
    under_way_.pop_front();
  }
}

void GroupCarrier::end_call() {
  const Announcement mine{.call = call_, .number = number_, .ends = 1};
  for (int64_t to = group_->rank() + 1; to < group_->world_size(); ++to) announce(mine, to);
  for (int64_t from = 0; from < group_->rank(); ++from) {
    const Announcement theirs = expect(from);
    if (!mine.agrees_with(theirs)) differ(mine, theirs, from);
  }
  wait();
}

void GroupCarrier::wait() {
  while (!under_way_.empty()) {
    wait_for(under_way_.front());
    under_way_.pop_front();
  }
}

}  // namespace accelerate::parallel::pipeline
