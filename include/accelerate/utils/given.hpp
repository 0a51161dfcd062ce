#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace accelerate {

/// A std::optional of a type that is complete only where the value is given or read: options that few programs set cost
/// the others no header. A value like std::optional: a copy has its own.
template <class T> class Given {
 public:
  Given() = default;
  Given(std::nullopt_t) {}
  /// A value, or a std::optional of one.
  template <class U = T>
  requires(!std::is_same_v<std::remove_cvref_t<U>, Given> && !std::is_same_v<std::remove_cvref_t<U>, std::nullopt_t>)
      Given(U&& value) {
    if constexpr (!std::is_same_v<std::remove_cvref_t<U>, std::optional<T>>) set(std::forward<U>(value));
    else if (value) set(*std::forward<U>(value));
  }
  Given(const Given& other) : value_(other ? other.copy_(*other.value_) : nullptr), copy_(other.copy_) {}
  Given(Given&& other) noexcept = default;
  Given& operator=(Given other) noexcept {
    std::swap(value_, other.value_), std::swap(copy_, other.copy_);
    return *this;
  }

  bool has_value() const { return value_ != nullptr; }
  explicit operator bool() const { return has_value(); }
  T& operator*() const { return *value_; }
  T* operator->() const { return value_.get(); }
  T value_or(T otherwise) const { return value_ ? *value_ : std::move(otherwise); }
  std::optional<T> to_optional() const { return value_ ? std::optional<T>(*value_) : std::nullopt; }
  template <class... Args> T& emplace(Args&&... args) {
    set(T{std::forward<Args>(args)...});
    return *value_;
  }
  void reset() { value_.reset(); }

 private:
  template <class U> void set(U&& value) {
    value_ = std::make_shared<T>(std::forward<U>(value));
    copy_ = [](const T& from) { return std::make_shared<T>(from); };
  }

  std::shared_ptr<T> value_;                        ///< destroys a T that is incomplete here
  std::shared_ptr<T> (*copy_)(const T&) = nullptr;  ///< likewise copies one
};

}  // namespace accelerate
