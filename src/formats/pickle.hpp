#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "utils/raise.hpp"

/// Pickles as data. Nothing is ever executed: a pickle becomes a tree in which a call of a function or the making of an
/// object is a node like any other, and the reader of the tree decides what it means. Names that its reader doesn't
/// expect are refused while parsing.
namespace accelerate::formats {

/// The one function whose call is understood while parsing: it makes a dict, which later opcodes fill.
inline constexpr std::string_view kPickleOrderedDict = "collections.OrderedDict";

/// How numpy makes arrays and their element types: empty, and a state says what they are. (The second, before
/// version 2.)
inline constexpr std::string_view kNumpyArray = "numpy._core.multiarray._reconstruct";
inline constexpr std::string_view kOldNumpyArray = "numpy.core.multiarray._reconstruct";
inline constexpr std::string_view kNumpyDtype = "numpy.dtype";

/// One value of a pickle.
struct PickleNode {
  enum class Kind : uint8_t {
    none,
    boolean,
    integer,
    real,
    text,
    bytes,
    list,
    tuple,
    dict,
    global,
    call,
    object,
    persistent
  };

  Kind kind = Kind::none;
  int64_t at = 0;       ///< Byte of the stream at which it was made, for messages.
  int64_t integer = 0;  ///< integer, boolean
  double real = 0;
  /// Text and bytes: points into the pickle; global: "module.name", points into the list of allowed ones; one that only
  /// "*" allows: its name without the module, points into the pickle.
  std::string_view text;
  std::vector<uint32_t> items;  ///< list, tuple: the items; dict: key, value, key, value; call: function, tuple of
                                ///< arguments, of numpy's two also the state; object: class, state (or none);
                                ///< persistent: the id
};

/// A parsed pickle (protocols 2 to 5, and of the opcodes those that plain data, named functions and objects need).
///
/// Values refer to each other by index and may form circles, as pickles can: a walk through them must limit its depth.
class Pickle {
 public:
  using Kind = PickleNode::Kind;
  /// A part of a tensor takes some 150 bytes of metadata: room for a few thousand tensors on a thousand ranks. How many
  /// values may be in it depends on its length, so that it takes at most some 20 times that.
  static constexpr size_t kMaxBytes = size_t{1} << 30;

  /// @param bytes    Must outlive this object, as must `globals`.
  /// @param globals  The names that may occur, as "module.name". "*" at the end allows all others, for readers that
  /// look at a part of what is there.
  /// @param source   Begins the messages, e.g. "DCP metadata '/run/.metadata'".
  /// @throws CheckpointError with the byte at which it stands for whatever is not a pickle of this kind: unknown opcode
  /// or name, truncation, a stack that is too short,
  ///   a memo slot that was never filled, lengths that exceed the stream.
  Pickle(std::string_view bytes, const std::vector<std::string_view>& globals, std::string source);

  const PickleNode& root() const { return nodes_[root_]; }
  const PickleNode& operator[](uint32_t index) const { return nodes_[index]; }
  uint32_t count() const { return static_cast<uint32_t>(nodes_.size()); }
  /// Bytes that it takes; others may follow.
  size_t size() const { return size_; }
  /// @param at  the byte where it stands
  template <class... Args> [[noreturn]] void fail(int64_t at, fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("{}, byte {}: {}", source_, at, fmt::format(what, std::forward<Args>(args)...));
  }

  /// The checked forms of a value; `what` names it in the message.
  const PickleNode& expect(const PickleNode& node, Kind kind, const std::string& what) const;
  std::string text(const PickleNode& node, const std::string& what) const;
  int64_t integer(const PickleNode& node, const std::string& what) const;
  bool boolean(const PickleNode& node, const std::string& what) const;
  /// True when the node is `name`; false for other nodes.
  static bool is_global(const PickleNode& node, std::string_view name) {
    return node.kind == Kind::global && node.text == name;
  }
  /// The arguments when `node` is a call of this function, else null.
  const std::vector<uint32_t>* call_of(const PickleNode& node, std::string_view function) const;
  /// The state of an object of this class. @throws CheckpointError for anything else.
  const PickleNode& state_of(const PickleNode& node, std::string_view type) const;
  /// An entry of a dict by its key, or null. The last one counts, as in Python.
  const PickleNode* find(const PickleNode& dict, std::string_view key) const;
  /// @throws CheckpointError when it is not there.
  const PickleNode& get(const PickleNode& dict, std::string_view key) const;

 private:
  friend class PickleParser;
  std::string source_;
  std::deque<PickleNode> nodes_;  // not moved as it grows
  uint32_t root_ = 0;
  size_t size_ = 0;
};

const char* to_string(PickleNode::Kind kind);

/// True if the bytes are UTF-8, the only text that a pickle can hold.
bool is_utf8(std::string_view text);

/// Writes protocol 2, which every version of Python and torch.load(weights_only=True) read. Strings and names that come
/// again are written once.
class PickleWriter {
 public:
  PickleWriter();

  void none() { op('N'); }
  void boolean(bool value) { op(value ? '\x88' : '\x89'); }
  void integer(int64_t value);
  void real(double value);
  void text(const std::string& value);   ///< @throws CheckpointError unless it is UTF-8
  void bytes(const std::string& value);  ///< Python's bytes, of which protocol 2 has no opcode
  void global(const std::string& module, const std::string& name);

  void mark() { op('('); }
  void tuple_of_mark() { op('t'); }  ///< everything behind the last mark
  void empty_tuple() { op(')'); }
  void empty_list() { op(']'); }
  void append_to_mark() { op('e'); }  ///< everything behind the last mark to the list before it
  void empty_dict() { op('}'); }
  void set_items_to_mark() { op('u'); }  ///< pairs behind the last mark to the dict before it
  void reduce() { op('R'); }             ///< function, tuple of arguments: the call
  void new_object() { op('\x81'); }      ///< class, empty tuple: the object
  void build() { op('b'); }              ///< object, state: the object
  void persistent() { op('Q'); }         ///< id: what it stands for

  /// Ends the pickle.
  std::string finish();

 protected:
  void op(char code) { bytes_ += code; }

 private:
  template <class T> void raw(T value);
  /// Puts a value of this kind and text from the memo if it is there, else runs `write` and memoises.
  template <class F> void once(const std::string& key, F&& write);

  std::string bytes_;
  std::map<std::string, uint32_t> memo_;
};

}  // namespace accelerate::formats
