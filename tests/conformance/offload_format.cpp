// Files of the offload folder, byte by byte.
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "accelerate/bigmodel/offload.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "folders.hpp"
#include "runner.hpp"

namespace conformance::offload_format_cases {
namespace {

namespace fs = std::filesystem;

void flatten(const json& values, std::vector<double>& result) {
  if (values.is_array())
    for (const json& value : values) flatten(value, result);
  else result.push_back(values.get<double>());
}

at::ScalarType type_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> types = {{"torch.float32", at::kFloat},
                                                              {"torch.float16", at::kHalf},
                                                              {"torch.bfloat16", at::kBFloat16},
                                                              {"torch.float64", at::kDouble},
                                                              {"torch.int64", at::kLong},
                                                              {"torch.int32", at::kInt},
                                                              {"torch.int16", at::kShort},
                                                              {"torch.int8", at::kChar},
                                                              {"torch.uint8", at::kByte},
                                                              {"torch.bool", at::kBool},
                                                              {"torch.float8_e4m3fn", at::kFloat8_e4m3fn},
                                                              {"torch.float8_e5m2", at::kFloat8_e5m2}};
  return types.at(name);
}

std::string hex_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::string text;
  for (const unsigned char byte : bytes) text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  return text;
}

at::Tensor doubles_of(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return torch::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size() / sizeof(double))}, at::kDouble).clone();
}

json index_json(const accelerate::OffloadIndex& index) {
  json result = json::object();
  for (const auto& [name, weight] : index) result[name] = {{"dtype", weight.dtype}, {"shape", weight.shape}};
  return result;
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

void run(const json& file, Report& report) {
  const auto expect = [&](const std::string& what, const json& found, const json& expected) {
    report.check(found == expected,
                 [&] { return what + ": expected " + expected.dump() + "\n    found " + found.dump(); });
  };
  for (const json& row : file.at("offload_weight")) {
    const std::string name = row[0];
    std::vector<double> values;
    flatten(row[3], values);
    const auto given = torch::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kDouble)
                           .reshape(row[2].get<std::vector<int64_t>>());
    at::Tensor tensor = given.to(type_of(row[1]), /*non_blocking=*/false, /*copy=*/true);
    // The rows' values went through fp32. Those of an fp64 tensor are in full only in the bytes that its file must
    // have.
    if (tensor.scalar_type() == at::kDouble) tensor = doubles_of(row[4].at("hex")).reshape(tensor.sizes());
    expect(name + " as fp32", tensor.to(at::kFloat).equal(given.to(at::kFloat)), true);
    const auto folder = fresh_folder("offload_format", name);
    accelerate::OffloadIndex index;
    accelerate::offload_weight(tensor, name, folder, &index);
    const auto back = accelerate::load_offloaded_weight(folder / (name + ".dat"), index.at(0).second);
    const json found{{"index", index_json(index)},
                     {"files", files_in(folder)},
                     {"hex", hex_of(folder / (name + ".dat"))},
                     {"roundtrip_equal", same_bytes(back, tensor)},
                     {"roundtrip_dtype", "torch." + index.at(0).second.dtype},
                     {"roundtrip_shape", back.sizes().vec()}};
    expect(name, found, row[4]);
  }
  const json& dict = file.at("offload_state_dict");
  const auto folder = fresh_folder("offload_format", "state_dict");
  accelerate::offload_state_dict(
      folder,
      {{"linear1.weight", torch::zeros({2, 3})}, {"linear1.bias", torch::zeros({2})}, {"bn.n", torch::tensor(0)}});
  expect("files", files_in(folder), dict.at("files"));
  expect("index.json", index_json(accelerate::load_offload_index(folder)), dict.at("index.json"));
  std::ifstream stream(folder / "index.json");
  expect("index_text", std::string{std::istreambuf_iterator<char>(stream), {}}, dict.at("index_text"));
  const std::map<std::string, int64_t> state = {{"linear1.weight", 1}, {"linear1.bias", 2}, {"linear11.weight", 3}};
  for (const json& row : file.at("extract_submodules_state_dict"))
    expect(row[0].dump(), accelerate::extract_submodules_state_dict(state, row[0].get<std::vector<std::string>>()),
           row[1]);
}

const Registration registration("offload_format", {run});

}  // namespace
}  // namespace conformance::offload_format_cases
