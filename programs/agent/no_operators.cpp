// LibTorch registers some three thousand operators while it is being loaded: 48 MB that no other process shares, and
// 0.3 s. The agent wants one class of it, c10d's store. A definition in the program comes before the library's in the
// dynamic linker's search, and these, through which registrations go, keep nothing. A LibTorch that registers by other
// ways costs memory again, which the test of the agent's memory would notice, and nothing else.

#include <ATen/core/op_registration/op_registration.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

namespace torch {

Library::Library(Kind kind, std::string ns, std::optional<c10::DispatchKey> key, const char* file, uint32_t line)
    : kind_(kind), ns_(std::move(ns)), dispatch_key_(key), file_(file), line_(line) {}
Library& Library::_def(c10::FunctionSchema&&, c10::OperatorName*, const std::vector<at::Tag>&, _RegisterOrVerify) & {
  return *this;
}
Library& Library::_def(std::variant<c10::OperatorName, c10::FunctionSchema>&&, CppFunction&&,
                       const std::vector<at::Tag>&) & {
  return *this;
}
Library& Library::_impl(const char*, CppFunction&&, _RegisterOrVerify) & { return *this; }
Library& Library::_fallback(CppFunction&&) & { return *this; }

namespace jit {

void registerOperator(Operator&&) {}
c10::FunctionSchema parseSchema(const std::string&, bool) { return {"none", "", {}, {}}; }
std::variant<c10::OperatorName, c10::FunctionSchema> parseSchemaOrName(const std::string&, bool) {
  return c10::OperatorName("none", "");
}

}  // namespace jit
}  // namespace torch

void c10::RegisterOperators::checkSchemaAndRegisterOp_(Options&&) {}
