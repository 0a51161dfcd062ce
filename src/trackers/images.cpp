#include "trackers/images.hpp"

#include <ATen/Functions.h>

#include <algorithm>

#include "trackers/crc.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

bool is_channels(int64_t size) { return size == 1 || size == 3 || size == 4; }

std::string layout_of(const std::string& name, const at::Tensor& images, const TrackerValues& log_kwargs) {
  const auto given = log_kwargs.find("dataformats");
  if (given == log_kwargs.end()) {
    const auto n = images.dim();
    const std::string layout = is_channels(images.size(n - 3)) ? "NCHW" : "NHWC";
    return n == 4 ? layout : layout.substr(1);
  }
  const auto* text = given->second.text();
  std::string layout = text ? *text : "";
  for (auto& letter : layout) letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  std::string sorted = layout;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != (images.dim() == 4 ? "CHNW" : "CHW"))
    raise<ShapeError>("log_images: found dataformats '{}' for '{}' of shape [{}], expected {}", text ? *text : "", name,
                      fmt::join(images.sizes(), ", "), images.dim() == 4 ? "NCHW or NHWC" : "CHW or HWC");
  return layout;
}

void put_big_endian(std::string& bytes, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(value >> shift);
}

void put_chunk(std::string& png, std::string_view kind, const std::string& content) {
  put_big_endian(png, static_cast<uint32_t>(content.size()));
  const auto checked = std::string(kind) + content;
  png += checked;
  put_big_endian(png, crc_of<0xEDB88320u>(checked));
}

/// A zlib stream (RFC 1950) of stored blocks (RFC 1951).
std::string stored(const std::string& bytes) {
  constexpr size_t kMost = 65535;
  std::string stream = "\x78\x01";
  size_t begin = 0;
  do {
    const size_t here = std::min(kMost, bytes.size() - begin);
    stream += static_cast<char>(begin + here == bytes.size() ? 1 : 0);
    for (const size_t length : {here, ~here}) {
      stream += static_cast<char>(length);
      stream += static_cast<char>(length >> 8);
    }
    stream.append(bytes, begin, here);
    begin += here;
  } while (begin < bytes.size());
  uint32_t a = 1, b = 0;
  for (const char byte : bytes) {
    a = (a + static_cast<unsigned char>(byte)) % 65521;
    b = (b + a) % 65521;
  }
  put_big_endian(stream, b << 16 | a);
  return stream;
}

}  // namespace

at::Tensor images_as_nhwc(const std::string& name, const at::Tensor& images, const TrackerValues& log_kwargs) {
  const auto layout = layout_of(name, images, log_kwargs);
  std::vector<int64_t> order;
  for (const char axis : std::string_view("NHWC"))
    if (const auto at = layout.find(axis); at != std::string::npos) order.push_back(static_cast<int64_t>(at));
  auto nhwc = images.to(at::kCPU).permute(order);
  if (nhwc.dim() == 3) nhwc = nhwc.unsqueeze(0);
  if (!is_channels(nhwc.size(3)) || nhwc.numel() == 0)
    raise<ShapeError>(
        "log_images: '{}' has the shape [{}], which is {} channels in the layout {}, expected 1, 3 or 4 "
        "and no empty dimension",
        name, fmt::join(images.sizes(), ", "), nhwc.size(3), layout);
  if (nhwc.is_floating_point()) nhwc = nhwc.to(at::kFloat).mul(255).nan_to_num(0).clamp(0, 255).to(at::kByte);
  return nhwc.contiguous();
}

at::Tensor image_grid(const at::Tensor& nhwc) {
  constexpr int64_t kInARow = 8;
  const int64_t n = nhwc.size(0), h = nhwc.size(1), w = nhwc.size(2), columns = std::min(n, kInARow);
  auto grid = at::zeros({h * ((n + columns - 1) / columns), w * columns, nhwc.size(3)}, nhwc.options());
  for (int64_t i = 0; i < n; ++i)
    grid.slice(0, i / columns * h, (i / columns + 1) * h)
        .slice(1, i % columns * w, (i % columns + 1) * w)
        .copy_(nhwc[i]);
  return grid;
}

std::string encode_png(const at::Tensor& hwc) {
  const auto image = hwc.contiguous();
  const int64_t height = image.size(0), row = image.size(1) * image.size(2);
  const auto* pixels = reinterpret_cast<const char*>(image.const_data_ptr<uint8_t>());
  std::string rows;
  rows.reserve(static_cast<size_t>(height * (row + 1)));
  for (int64_t y = 0; y < height; ++y) {
    rows += '\0';  // not filtered
    rows.append(pixels + y * row, static_cast<size_t>(row));
  }
  constexpr char kGrey = 0, kColours = 2, kWithAlpha = 6;
  std::string header;
  put_big_endian(header, static_cast<uint32_t>(image.size(1)));
  put_big_endian(header, static_cast<uint32_t>(height));
  header += '\x08';  // bits
  header += image.size(2) == 1 ? kGrey : image.size(2) == 3 ? kColours : kWithAlpha;
  header.append(3, '\0');  // deflate, filters by row, not interlaced
  std::string png = "\x89PNG\r\n\x1a\n";
  put_chunk(png, "IHDR", header);
  put_chunk(png, "IDAT", stored(rows));
  put_chunk(png, "IEND", "");
  return png;
}

}  // namespace accelerate
