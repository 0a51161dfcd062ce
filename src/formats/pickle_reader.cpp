#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "formats/pickle.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {

using Kind = PickleNode::Kind;

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    const int more = lead >= 0xc2 && lead < 0xe0   ? 1
                     : lead >= 0xe0 && lead < 0xf0 ? 2
                     : lead >= 0xf0 && lead < 0xf5 ? 3
                                                   : 0;
    if (more == 0 || text.size() - i < static_cast<size_t>(more)) return false;
    uint32_t point = lead & (0x3fu >> more);
    for (int k = 0; k < more; ++k) {
      const auto next = static_cast<unsigned char>(text[i++]);
      if ((next & 0xc0) != 0x80) return false;
      point = (point << 6) | (next & 0x3fu);
    }
    // Too long forms, halves of surrogate pairs, beyond the last code point.
    if ((more == 2 && point < 0x800) || (more == 3 && point < 0x10000) || (point >= 0xd800 && point < 0xe000) ||
        point > 0x10ffff)
      return false;
  }
  return true;
}

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::none:
      return "None";
    case Kind::boolean:
      return "a bool";
    case Kind::integer:
      return "an integer";
    case Kind::real:
      return "a float";
    case Kind::text:
      return "a string";
    case Kind::bytes:
      return "bytes";
    case Kind::list:
      return "a list";
    case Kind::tuple:
      return "a tuple";
    case Kind::dict:
      return "a dict";
    case Kind::global:
      return "a class or function";
    case Kind::call:
      return "a call";
    case Kind::object:
      return "an object";
    case Kind::persistent:
      return "a persistent id";
  }
  return "?";
}

/// The stack machine of pickle. Its values are indices of nodes, so that nothing is copied when a value is memoised or
/// used twice.
class PickleParser {
 public:
  PickleParser(std::string_view bytes, const std::vector<std::string_view>& globals, Pickle& pickle)
      : bytes_(bytes), globals_(globals), pickle_(pickle) {}

  void run() {
    if (bytes_.size() > Pickle::kMaxBytes)
      fail("it is {} bytes long, expected at most {}.", bytes_.size(), Pickle::kMaxBytes);
    if (take(1) != "\x80")
      fail(
          "it does not start with the opcode 0x80 of a pickle (protocol 2 or later). It is another kind of file, or "
          "was overwritten.");
    if (const auto protocol = number<uint8_t>(); protocol < 2 || protocol > 5)
      fail("its protocol is {}, expected 2 to 5.", protocol);
    for (;;) {
      at_ = position_;
      const auto code = number<uint8_t>();
      if (code == '.') break;
      step(code);
    }
    pickle_.root_ = pop();
    pickle_.size_ = position_;
    if (!stack_.empty() || !marks_.empty())
      fail("the pickle ends with {} values on its stack, expected one.", stack_.size() + 1);
  }

 private:
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    pickle_.fail(at_, what, std::forward<Args>(args)...);
  }

  std::string_view take(uint64_t count) {
    if (count > bytes_.size() - position_)
      fail("needs {} more bytes where {} are left. The file is truncated or damaged: copy it again, or save again.",
           count, bytes_.size() - position_);
    const auto result = bytes_.substr(position_, static_cast<size_t>(count));
    position_ += static_cast<size_t>(count);
    return result;
  }

  /// Little-endian.
  template <class T> T number() {
    const auto raw = take(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i)
      value |= static_cast<uint64_t>(static_cast<unsigned char>(raw[i])) << (8 * i);
    return static_cast<T>(value);
  }

  std::string_view line() {
    const auto end = bytes_.find('\n', position_);
    if (end == std::string_view::npos) fail("a name is not ended by a newline. The file is truncated or damaged.");
    const auto result = bytes_.substr(position_, end - position_);
    position_ = end + 1;
    return result;
  }

  PickleNode& add(Kind kind) {
    // A value takes 70 bytes and one that holds others 100, though an opcode may be all that the file has of it. Values
    // in files take more than that.
    const bool is_plain = kind == Kind::integer || kind == Kind::real || kind == Kind::text || kind == Kind::bytes;
    weight_ += is_plain ? 1 : 2;
    if (const auto most = 300'000 + bytes_.size() / 5; weight_ > most)
      fail("it has more than {} values, which is more than a file of its length can mean.", most);
    stack_.push_back(static_cast<uint32_t>(pickle_.nodes_.size()));
    auto& node = pickle_.nodes_.emplace_back();
    node.kind = kind;
    node.at = static_cast<int64_t>(at_);
    return node;
  }

  /// A value that cannot change: one node for all of its kind and number.
  void add_shared(Kind kind, int64_t number) {
    const auto slot = static_cast<size_t>(kind == Kind::none      ? 0
                                          : kind == Kind::boolean ? 1 + number
                                          : kind == Kind::tuple   ? 3
                                                                  : 4 + number);
    if (slot >= shared_.size()) shared_.resize(slot + 1, kNoNode);
    auto& place = shared_[slot];
    if (place == kNoNode) {
      add(kind).integer = number;
      place = stack_.back();
    } else {
      stack_.push_back(place);
    }
  }

  size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }

  uint32_t pop() {
    if (stack_.size() <= bottom()) fail("takes a value from an empty stack. The file is damaged.");
    const auto value = stack_.back();
    stack_.pop_back();
    return value;
  }

  PickleNode& top(Kind kind) {
    if (stack_.size() <= bottom()) fail("takes a value from an empty stack. The file is damaged.");
    auto& node = pickle_.nodes_[stack_.back()];
    if (node.kind != kind) fail("found {} on the stack, expected {}.", to_string(node.kind), to_string(kind));
    return node;
  }

  std::vector<uint32_t> pop_mark() {
    if (marks_.empty()) fail("takes the values behind a mark, but no mark was set. The file is damaged.");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<uint32_t> items(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }

  void tuple(size_t count) {
    std::vector<uint32_t> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    add(Kind::tuple).items = std::move(items);
  }

  void put(uint64_t slot) {
    if (stack_.size() <= bottom()) fail("memoises a value of an empty stack. The file is damaged.");
    if (memo_.empty() && slot == 1) first_slot_ = 1;
    // Every pickler counts its slots up, so a larger number is damage or an attempt to make this table large.
    const auto place = slot - first_slot_;
    if (place > memo_.size())
      fail("memoises in slot {}, expected at most {}. The file is damaged.", slot, memo_.size() + first_slot_);
    if (place == memo_.size()) memo_.push_back(stack_.back());
    else memo_[place] = stack_.back();
  }

  void get(uint64_t slot) {
    const auto place = slot - first_slot_;
    if (place >= memo_.size())
      fail("reads memo slot {}, but only {} were filled. The file is damaged.", slot, memo_.size());
    stack_.push_back(memo_[place]);
  }

  /// Python 3 makes an empty one, which later opcodes fill; Python 2 makes it of a list of pairs.
  void ordered_dict(const PickleNode& arguments) {
    std::vector<uint32_t> items;
    for (const auto list : arguments.items)
      for (const auto pair : pickle_.nodes_[list].items) {
        const auto& entry = pickle_.nodes_[pair].items;
        if (arguments.items.size() != 1 || entry.size() != 2)
          fail("makes an OrderedDict of {}, expected nothing or a list of pairs. The file is damaged.",
               to_string(pickle_.nodes_[list].kind));
        items.insert(items.end(), entry.begin(), entry.end());
      }
    // A list may be named again and again; each pair of one that is written takes bytes.
    if ((copied_ += items.size()) > bytes_.size()) fail("makes more of its lists than it has. The file is damaged.");
    add(Kind::dict).items = std::move(items);
  }

  void global(std::string_view module, std::string_view name) {
    for (const auto& allowed : globals_) {
      if (allowed.size() == module.size() + 1 + name.size() && allowed.starts_with(module) &&
          allowed[module.size()] == '.' && allowed.ends_with(name)) {
        add(Kind::global).text = allowed;
        return;
      }
    }
    if (takes_all_names()) {
      add(Kind::global).text = name;
      return;
    }
    fail(
        "names '{}.{}', which is none of the classes and functions that belong into such a file. Python code in files "
        "is never executed here; save numbers, text, tensors, lists and dicts only.",
        module.substr(0, 200), name.substr(0, 200));
  }

  bool takes_all_names() const { return !globals_.empty() && globals_.back() == "*"; }
  bool takes_state(const PickleNode& node) const {
    if (node.kind != Kind::call) return false;
    const auto function = pickle_.nodes_[node.items[0]].text;
    return function == kNumpyArray || function == kOldNumpyArray || function == kNumpyDtype;
  }

  std::string_view pop_text() {
    const auto& node = pickle_.nodes_[pop()];
    if (node.kind != Kind::text) fail("found {} on the stack, expected a string.", to_string(node.kind));
    return node.text;
  }

  void long_integer(uint64_t size) {
    if (size > sizeof(int64_t)) fail("holds an integer of {} bytes, expected at most 8.", size);
    const auto raw = take(size);
    uint64_t value = size > 0 && (raw.back() & 0x80) ? ~uint64_t{0} : 0;
    for (size_t i = raw.size(); i-- > 0;) value = (value << 8) | static_cast<unsigned char>(raw[i]);
    add(Kind::integer).integer = static_cast<int64_t>(value);
  }

  void text(Kind kind, uint64_t size) {
    const auto value = take(size);
    if (kind == Kind::text && !is_utf8(value)) fail("a string is not UTF-8. The file is damaged.");
    add(kind).text = value;
  }

  void step(uint8_t code) {
    switch (code) {
      case 0x95: {  // FRAME: only a hint for buffered reading
        const auto size = number<uint64_t>();
        if (size > bytes_.size() - position_)
          fail("announces a frame of {} bytes where {} are left. The file is truncated: copy it again, or save again.",
               size, bytes_.size() - position_);
        return;
      }
      case '(':
        marks_.push_back(stack_.size());
        return;
      case '0':
        pop();
        return;
      case '1':
        pop_mark();
        return;
      case 'N':
        add_shared(Kind::none, 0);
        return;
      case 0x88:
        add_shared(Kind::boolean, 1);
        return;
      case 0x89:
        add_shared(Kind::boolean, 0);
        return;
      case 'K':
        add_shared(Kind::integer, number<uint8_t>());
        return;
      case 'M':
        add_shared(Kind::integer, number<uint16_t>());
        return;
      case 'J': {
        const auto value = number<int32_t>();
        add(Kind::integer).integer = value;
        return;
      }
      case 0x8a:
        long_integer(number<uint8_t>());
        return;
      case 'G': {
        uint64_t bits = 0;
        for (const unsigned char byte : take(8)) bits = (bits << 8) | byte;
        add(Kind::real).real = std::bit_cast<double>(bits);
        return;
      }
      case 0x8c:
        text(Kind::text, number<uint8_t>());
        return;
      case 'U':  // Python 2's
        text(Kind::text, number<uint8_t>());
        return;
      case 'T':
      case 'X':
        text(Kind::text, number<uint32_t>());
        return;
      case 0x8d:
        text(Kind::text, number<uint64_t>());
        return;
      case 'C':
        text(Kind::bytes, number<uint8_t>());
        return;
      case 'B':
        text(Kind::bytes, number<uint32_t>());
        return;
      case 0x8e:
        text(Kind::bytes, number<uint64_t>());
        return;
      case ')':
        add_shared(Kind::tuple, 0);
        return;
      case 0x85:
        tuple(1);
        return;
      case 0x86:
        tuple(2);
        return;
      case 0x87:
        tuple(3);
        return;
      case 't': {
        auto items = pop_mark();
        add(Kind::tuple).items = std::move(items);
        return;
      }
      case ']':
        add(Kind::list);
        return;
      case 'a': {
        const auto value = pop();
        top(Kind::list).items.push_back(value);
        return;
      }
      case 'e': {
        const auto items = pop_mark();
        auto& list = top(Kind::list).items;
        list.insert(list.end(), items.begin(), items.end());
        return;
      }
      case '}':
        add(Kind::dict);
        return;
      case 's': {
        const auto value = pop(), key = pop();
        auto& dict = top(Kind::dict).items;
        dict.push_back(key);
        dict.push_back(value);
        return;
      }
      case 'u': {
        const auto items = pop_mark();
        if (items.size() % 2 != 0) fail("a dict gets a key without a value. The file is damaged.");
        auto& dict = top(Kind::dict).items;
        dict.insert(dict.end(), items.begin(), items.end());
        return;
      }
      case 'q':
        put(number<uint8_t>());
        return;
      case 'r':
        put(number<uint32_t>());
        return;
      case 0x94:
        put(memo_.size() + first_slot_);
        return;
      case 'h':
        get(number<uint8_t>());
        return;
      case 'j':
        get(number<uint32_t>());
        return;
      case 'c': {
        const auto module = line(), name = line();
        global(module, name);
        return;
      }
      case 0x93: {
        const auto name = pop_text(), module = pop_text();
        global(module, name);
        return;
      }
      case 'R': {
        top(Kind::tuple);
        const auto arguments = pop();
        top(Kind::global);
        const auto function = pop();
        if (pickle_.nodes_[function].text == kPickleOrderedDict) ordered_dict(pickle_.nodes_[arguments]);
        else add(Kind::call).items = {function, arguments};
        return;
      }
      case 0x81: {
        if (!top(Kind::tuple).items.empty()) fail("makes an object with arguments, expected none.");
        pop();
        top(Kind::global);
        const auto type = pop();
        add(Kind::object).items = {type};
        return;
      }
      case 'b': {
        const auto state = pop();
        // state_dict() hangs its versions on the OrderedDict as an attribute, which nobody needs.
        if (stack_.size() > bottom() && pickle_.nodes_[stack_.back()].kind == Kind::dict) return;
        if (stack_.size() > bottom() && takes_state(pickle_.nodes_[stack_.back()])) {
          auto& call = pickle_.nodes_[stack_.back()];
          call.items.resize(2);
          call.items.push_back(state);
          return;
        }
        // Nor do readers that look at a part of what is there need the attributes of what another call made.
        if (takes_all_names() && stack_.size() > bottom() && pickle_.nodes_[stack_.back()].kind == Kind::call) return;
        auto& object = top(Kind::object);
        object.items.resize(1);
        object.items.push_back(state);
        return;
      }
      case 'Q': {
        const auto id = pop();
        add(Kind::persistent).items = {id};
        return;
      }
      default:
        fail("has the opcode 0x{:02x}, which such a file never needs. The file is damaged or of another kind.", code);
    }
  }

  std::string_view bytes_;
  const std::vector<std::string_view>& globals_;
  Pickle& pickle_;
  size_t position_ = 0;
  size_t at_ = 0;  ///< of the opcode being executed
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;
  std::vector<uint32_t> memo_;
  size_t copied_ = 0;        ///< items of lists
  uint64_t first_slot_ = 0;  ///< of Python 2 it is 1
  static constexpr uint32_t kNoNode = std::numeric_limits<uint32_t>::max();
  std::vector<uint32_t> shared_;  ///< see add_shared
  size_t weight_ = 0;             ///< of the values
};

Pickle::Pickle(std::string_view bytes, const std::vector<std::string_view>& globals, std::string source)
    : source_(std::move(source)) {
  PickleParser(bytes, globals, *this).run();
}

const PickleNode& Pickle::expect(const PickleNode& node, Kind kind, const std::string& what) const {
  if (node.kind != kind) fail(node.at, "{} is {}, expected {}.", what, to_string(node.kind), to_string(kind));
  return node;
}

std::string Pickle::text(const PickleNode& node, const std::string& what) const {
  return std::string(expect(node, Kind::text, what).text);
}
int64_t Pickle::integer(const PickleNode& node, const std::string& what) const {
  return expect(node, Kind::integer, what).integer;
}
bool Pickle::boolean(const PickleNode& node, const std::string& what) const {
  return expect(node, Kind::boolean, what).integer != 0;
}

const std::vector<uint32_t>* Pickle::call_of(const PickleNode& node, std::string_view function) const {
  return node.kind == Kind::call && nodes_[node.items[0]].text == function ? &nodes_[node.items[1]].items : nullptr;
}

const PickleNode& Pickle::state_of(const PickleNode& node, std::string_view type) const {
  if (node.kind != Kind::object || nodes_[node.items[0]].text != type)
    fail(node.at, "found {}, expected an object of {}.",
         node.kind == Kind::object ? nodes_[node.items[0]].text : std::string_view(to_string(node.kind)), type);
  if (node.items.size() < 2) fail(node.at, "an object of {} has no state.", type);
  return nodes_[node.items[1]];
}

const PickleNode* Pickle::find(const PickleNode& dict, std::string_view key) const {
  const PickleNode* found = nullptr;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2)
    if (const auto& name = nodes_[dict.items[i]]; name.kind == Kind::text && name.text == key)
      found = &nodes_[dict.items[i + 1]];
  return found;
}

const PickleNode& Pickle::get(const PickleNode& dict, std::string_view key) const {
  if (const auto* found = find(expect(dict, Kind::dict, "the state with the field '" + std::string(key) + "'"), key))
    return *found;
  fail(dict.at, "the field '{}' is missing.", key);
}

}  // namespace accelerate::formats
