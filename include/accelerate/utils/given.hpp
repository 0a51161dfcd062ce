#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace accelerate {

/// A std::optional of a type that is complete only where the value is given or read: options that few programs set cost
/// the others no header. Copies share the value.
template <class T> class Given {
 public:
  Given() = default;
  Given(std::nullopt_t) {}
  template <class U = T>
  requires(!std::is_same_v<std::remove_cvref_t<U>, Given> && !std::is_same_v<std::remove_cvref_t<U>, std::nullopt_t>)
      Given(U&& value)
      : value_(std::make_shared<T>(std::forward<U>(value))) {}

  bool has_value() const { return value_ != nullptr; }
  explicit operator bool() const { return has_value(); }
  T& operator*() const { return *value_; }
  T* operator->() const { return value_.get(); }
  T value_or(T otherwise) const { return value_ ? *value_ : std::move(otherwise); }

 private:
  std::shared_ptr<T> value_;
};

}  // namespace accelerate
