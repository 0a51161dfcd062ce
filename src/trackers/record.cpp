#include "trackers/record.hpp"

#include <chrono>

#include "utils/raise.hpp"

namespace accelerate {
namespace {

size_t bytes_of(const TrackerValue& value) {
  size_t bytes = sizeof(TrackerValue);
  if (const auto* text = value.text()) bytes += text->size();
  if (const auto* list = value.list())
    for (const auto& one : *list) bytes += bytes_of(one);
  if (const auto* map = value.map())
    for (const auto& [name, one] : *map) bytes += name.size() + bytes_of(one) + 64;  // a node's pointers and colour
  return bytes;
}

size_t bytes_of_map(const TrackerValues& values) {
  size_t bytes = 0;
  for (const auto& [name, one] : values) bytes += name.size() + bytes_of(one) + 64;
  return bytes;
}

Record recorded(std::optional<TrackerData> kind, size_t bytes,
                std::function<void(GeneralTracker&, const TrackerValues&)> write) {
  return std::make_shared<TrackerRecord>(
      TrackerRecord{.write = std::move(write), .kind = kind, .bytes = bytes + 256, .time = wall_time()});
}

/// The program goes on to change its tensors.
at::Tensor kept(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU, tensor.scalar_type(), false, true); }

}  // namespace

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

Record record_of_configuration(TrackerValues config) {
  const size_t bytes = bytes_of_map(config);
  return recorded(std::nullopt, bytes, [config = std::move(config)](GeneralTracker& tracker, const TrackerValues&) {
    tracker.store_init_configuration(config);
  });
}

Record record_of_values(TrackerValues values, std::optional<int64_t> step) {
  const size_t bytes = bytes_of_map(values);
  return recorded(std::nullopt, bytes,
                  [values = std::move(values), step](GeneralTracker& tracker, const TrackerValues& log_kwargs) {
                    tracker.log(values, step, log_kwargs);
                  });
}

Record record_of_images(const std::map<std::string, at::Tensor>& images, std::optional<int64_t> step) {
  std::map<std::string, at::Tensor> copies;
  size_t bytes = 0;
  for (const auto& [name, image] : images) {
    if (!image.defined() || image.dim() < 3 || image.dim() > 4 ||
        !(image.scalar_type() == at::kByte || at::isFloatingType(image.scalar_type())))
      raise<ShapeError>(
          "log_images: '{}' has {}, expected [N, H, W, C] or [N, C, H, W] (or one image without N) of uint8, or of "
          "floating numbers from 0 to 1",
          name,
          image.defined() ? fmt::format("{} dimensions of {}", image.dim(), c10::toString(image.scalar_type()))
                          : "no tensor");
    copies.emplace(name, kept(image));
    bytes += image.nbytes();
  }
  return recorded(TrackerData::images, bytes,
                  [copies = std::move(copies), step](GeneralTracker& tracker, const TrackerValues& log_kwargs) {
                    tracker.log_images(copies, step, log_kwargs);
                  });
}

Record record_of_table(std::string table_name, std::vector<std::string> columns, std::vector<TrackerList> rows,
                       std::optional<int64_t> step) {
  size_t bytes = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].size() != columns.size())
      raise<ShapeError>("log_table: row {} of '{}' has {} cells, expected {}, one for each column", i, table_name,
                        rows[i].size(), columns.size());
    for (const auto& cell : rows[i]) bytes += bytes_of(cell);
  }
  return recorded(TrackerData::tables, bytes,
                  [table_name = std::move(table_name), columns = std::move(columns), rows = std::move(rows), step](
                      GeneralTracker& tracker, const TrackerValues& log_kwargs) {
                    tracker.log_table(table_name, columns, rows, step, log_kwargs);
                  });
}

Record record_of_histogram(std::string histogram_name, const at::Tensor& values, std::optional<int64_t> step) {
  if (!values.defined() || values.is_complex())
    raise<ShapeError>("log_histogram: '{}' is {}, expected a tensor of real numbers", histogram_name,
                      values.defined() ? "complex" : "no tensor");
  return recorded(TrackerData::histograms, values.nbytes(),
                  [histogram_name = std::move(histogram_name), copy = kept(values), step](
                      GeneralTracker& tracker, const TrackerValues& log_kwargs) {
                    tracker.log_histogram(histogram_name, copy, step, log_kwargs);
                  });
}

}  // namespace accelerate
