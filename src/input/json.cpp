#include "input/json.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Makes values of what the JSON library's parser, which is not recursive, finds one by one.
template <class Json> class Builder {
 public:
  using number_integer_t = typename Json::number_integer_t;
  using number_unsigned_t = typename Json::number_unsigned_t;
  using number_float_t = typename Json::number_float_t;
  using string_t = typename Json::string_t;
  using binary_t = typename Json::binary_t;

  using TakeMember = std::function<void(const string_t& name, const Json& value)>;
  using TakeElement = std::function<void(Json& element)>;

  /// @param take_member  if it is there, the root must be an object and loses its members to it
  Builder(size_t text_bytes, const JsonRules& rules, const TakeMember* take_member = nullptr)
      // A value takes up to 100 bytes, and 2 of text.
      : most_(500'000 + text_bytes / 6), left_(most_), rules_(rules), take_member_(take_member) {}

  /// The member `list` of the root, if it is a list, loses its elements to `take`.
  void give_elements(const string_t& list, const TakeElement& take) {
    list_ = &list;
    take_element_ = &take;
  }

  Json take() { return std::move(root_); }
  std::string& problem() { return problem_; }

  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(number_integer_t value) { return add(value); }
  bool number_unsigned(number_unsigned_t value) { return add(value); }
  bool number_float(number_float_t value, const string_t&) { return add(value); }
  bool string(string_t& value) { return add(std::move(value)); }
  bool binary(binary_t&) { return false; }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_array() { return close(); }
  bool start_object(size_t) { return open(Json::object()); }
  bool key(string_t& name) {
    key_ = std::move(name);
    return true;
  }
  bool end_object() {
    if constexpr (kKeepsOrder)
      if (!unite_equal_keys(*open_.back())) return false;
    return close();
  }
  bool parse_error(size_t, const std::string&, const typename Json::exception& error) {
    const std::string_view text = error.what();
    return fail(
        fmt::format("is not valid {} ({})", text.find("UTF-8") != text.npos ? "UTF-8" : "JSON", text.substr(0, 200)));
  }

 private:
  static constexpr bool kKeepsOrder = std::is_same_v<Json, nlohmann::ordered_json>;
  using Pairs = std::vector<std::pair<const string_t, Json>>;

  bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  bool twice(const string_t& key) {
    return fail(fmt::format("has the key {} twice in one object, so which one holds is open", show_json(Json(key))));
  }

  /// The place of the value that comes next; null when it must not be there.
  Json* place() {
    if (left_-- == 0) {
      fail("has more values than text of its length can mean");
      return nullptr;
    }
    if (open_.empty()) return &root_;
    if (is_element()) return &element_;
    if (is_member()) {
      name_ = std::move(key_);
      return &member_;
    }
    Json& in = *open_.back();
    if (in.is_array()) return &in.template get_ref<typename Json::array_t&>().emplace_back();
    auto& object = in.template get_ref<typename Json::object_t&>();
    if constexpr (kKeepsOrder) {
      // Appended without the search for an equal key that emplace() makes: of n keys it would take n * n steps.
      return &static_cast<Pairs&>(object).emplace_back(std::move(key_), nullptr).second;
    } else {
      const auto [found, fresh] = object.try_emplace(std::move(key_));
      if (!fresh && rules_.unique_keys) {
        twice(found->first);
        return nullptr;
      }
      return &found->second;
    }
  }
  template <class T> bool add(T&& value) {
    Json* const to = place();
    if (!to) return false;
    *to = std::forward<T>(value);
    return complete();
  }
  bool open(Json container) {
    if (open_.size() == rules_.deepest) return fail(fmt::format("is nested deeper than {} levels", rules_.deepest));
    Json* const to = place();
    if (!to) return false;
    *to = std::move(container);
    if (take_element_ && to == &member_ && name_ == *list_) in_list_ = to->is_array();
    open_.push_back(to);
    return true;
  }
  bool close() {
    open_.pop_back();
    return complete();
  }

  /// Whether the value that comes or has come belongs to the root, which gives its members away.
  bool is_member() const { return take_member_ && open_.size() == 1; }
  bool is_element() const { return in_list_ && open_.size() == 2; }
  bool complete() {
    if (take_member_ && !root_.is_object()) return fail("is not a JSON object");
    if (is_element()) {
      (*take_element_)(element_);
      left_ = most_;  // it is gone, and what it took
    } else if (is_member()) {
      in_list_ = false;
      (*take_member_)(name_, member_);
      if (take_element_) left_ = most_;
    }
    return true;
  }

  /// The first place and the last value, as in Python.
  bool unite_equal_keys(Json& in) {
    auto& object = in.template get_ref<typename Json::object_t&>();
    auto& pairs = static_cast<Pairs&>(object);
    std::vector<uint32_t> order(pairs.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return pairs[a].first < pairs[b].first; });
    std::vector<bool> gone;
    for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
      for (end = begin + 1; end < order.size() && pairs[order[end]].first == pairs[order[begin]].first;) ++end;
      if (end == begin + 1) continue;
      if (rules_.unique_keys) return twice(pairs[order[begin]].first);
      gone.resize(pairs.size());
      pairs[order[begin]].second = std::move(pairs[order[end - 1]].second);
      for (size_t i = begin + 1; i < end; ++i) gone[order[i]] = true;
    }
    if (gone.empty()) return true;
    typename Json::object_t kept;
    for (size_t i = 0; i < pairs.size(); ++i)
      if (!gone[i]) static_cast<Pairs&>(kept).emplace_back(pairs[i].first, std::move(pairs[i].second));
    object.swap(kept);
    return true;
  }

  Json root_, member_, element_;
  string_t name_;            ///< of the member
  std::vector<Json*> open_;  ///< lists and objects that have begun; none of them moves while it is open
  string_t key_;
  size_t most_, left_;
  const JsonRules& rules_;
  const TakeMember* take_member_;
  const string_t* list_ = nullptr;
  const TakeElement* take_element_ = nullptr;
  bool in_list_ = false;
  std::string problem_;
};

/// The letters of a text that comes in pieces.
class TextPieces {
 public:
  explicit TextPieces(const std::function<std::string_view()>& more) : more_(more) { next(); }
  bool ended() const { return piece_.empty(); }
  bool has_nul() const { return has_nul_; }
  char letter() const { return piece_.front(); }
  void advance() {
    piece_.remove_prefix(1);
    if (piece_.empty()) next();
  }

 private:
  void next() {
    piece_ = more_();
    // As in fill(): the text ends here for the JSON library.
    has_nul_ = has_nul_ || piece_.find('\0') != std::string_view::npos;
  }

  const std::function<std::string_view()>& more_;
  std::string_view piece_;
  bool has_nul_ = false;
};

class PiecesIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  explicit PiecesIterator(TextPieces* pieces = nullptr) : pieces_(pieces) {}
  char operator*() const { return pieces_->letter(); }
  PiecesIterator& operator++() {
    pieces_->advance();
    return *this;
  }
  bool operator==(const PiecesIterator& other) const { return at_end() == other.at_end(); }

 private:
  bool at_end() const { return !pieces_ || pieces_->ended(); }
  TextPieces* pieces_;
};

template <class Json> bool fill(Builder<Json>& builder, std::string_view text) {
  // The JSON library takes a NUL for the end of its input and would ignore what follows.
  const bool has_nul = text.find('\0') != text.npos;
  if (has_nul) builder.problem() = "is not valid JSON: it holds a NUL byte";
  return !has_nul && Json::sax_parse(text.begin(), text.end(), &builder);
}

template <class Json> void show(const Json& value, size_t most, std::string& text) {
  if (text.size() > most) return;
  if (value.is_string()) {
    const auto& whole = value.template get_ref<const std::string&>();
    text += Json(whole.substr(0, most)).dump(-1, ' ', false, Json::error_handler_t::replace);
  } else if (value.is_structured()) {
    text += value.is_array() ? '[' : '{';
    const char* between = "";
    for (auto item = value.begin(); item != value.end() && text.size() <= most; ++item, between = ",") {
      text += between;
      if (value.is_object()) show(Json(item.key()), most, text), text += ':';
      show(*item, most, text);
    }
    text += value.is_array() ? ']' : '}';
  } else {
    text += value.is_discarded() ? "no JSON" : value.dump();
  }
}

}  // namespace

template <class Json> Json parse_json(std::string_view text, std::string* problem, const JsonRules& rules) {
  Builder<Json> builder(text.size(), rules);
  if (fill(builder, text)) return builder.take();
  if (problem) *problem = builder.problem();
  return Json(Json::value_t::discarded);
}

std::string parse_json_members(std::string_view text,
                               const std::function<void(const std::string& name, const nlohmann::json& value)>& take,
                               const JsonRules& rules) {
  Builder<nlohmann::json> builder(text.size(), rules, &take);
  return fill(builder, text) ? "" : builder.problem();
}

std::string parse_json_stream(const JsonStream& stream, const JsonRules& rules) {
  Builder<nlohmann::json> builder(0, rules, &stream.take_member);
  builder.give_elements(stream.list, stream.take_element);
  TextPieces pieces(stream.more);
  const bool valid = nlohmann::json::sax_parse(PiecesIterator(&pieces), PiecesIterator(), &builder);
  if (pieces.has_nul()) return "is not valid JSON: it holds a NUL byte";
  return valid ? "" : builder.problem();
}

template <class Json> std::string show_json(const Json& value, size_t most_bytes) {
  std::string text;
  show(value, most_bytes, text);
  if (text.size() > most_bytes) {
    size_t end = most_bytes - 3;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // whole characters
    text.replace(end, std::string::npos, "...");
  }
  return text;
}

template nlohmann::json parse_json(std::string_view, std::string*, const JsonRules&);
template nlohmann::ordered_json parse_json(std::string_view, std::string*, const JsonRules&);
template std::string show_json(const nlohmann::json&, size_t);
template std::string show_json(const nlohmann::ordered_json&, size_t);

}  // namespace accelerate
