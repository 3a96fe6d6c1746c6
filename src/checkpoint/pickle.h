#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paceline::checkpoint {

// Python's pickles as data. A pickle is a program that builds objects, also by calling functions;
// here a call is a value as well, and nothing is run. The format is documented in CPython's
// pickletools.py.

struct PickleValue {
  enum class Kind {
    none,
    boolean,
    integer,
    real,
    text,  // normally UTF-8
    bytes,
    list,
    tuple,
    dict,
    set,
    global,      // a class or a function: `text` is "torch._utils._rebuild_tensor_v2"
    call,        // what `callee` returns for `arguments`, or an object of that class
    persistent,  // what the reader finds for the one element
  };

  Kind kind = Kind::none;
  bool boolean = false;
  std::int64_t integer = 0;
  double real = 0;
  std::string text{};
  const PickleValue* callee = nullptr;
  const PickleValue* arguments = nullptr;  // a tuple
  const PickleValue* state = nullptr;      // of the object that a call makes; null if it has none
  // Of a list, tuple, set or persistent value.
  std::vector<const PickleValue*> elements{};
  // Of a dict, or what was stored in the object that a call makes: by keys, and by appending.
  std::vector<std::pair<const PickleValue*, const PickleValue*>> items{};
  std::vector<const PickleValue*> appended{};
};

// Values that refer to each other. Several may refer to one.
class Pickle {
 public:
  using Kind = PickleValue::Kind;

  PickleValue& add(PickleValue value) { return values_.emplace_back(std::move(value)); }
  PickleValue& add_text(Kind kind, std::string text);
  PickleValue& add_integer(std::int64_t integer);
  // A tuple or list.
  PickleValue& add_sequence(Kind kind, std::vector<const PickleValue*> elements);
  PickleValue& add_call(const PickleValue& callee, std::vector<const PickleValue*> arguments);

  const PickleValue* root = nullptr;

 private:
  std::deque<PickleValue> values_;  // whose addresses stay
};

// Parses a pickle of protocol 2 to 5. No value reachable from the root contains itself, or is
// nested deeper than kMaxNesting, so callers may recurse. Throws CorruptFile, which names the file
// `name` and the byte, if the pickle is malformed, and UsageError for what has no counterpart here:
// integers outside of int64, extension codes, buffers outside of the pickle. What it allocates
// is bounded by the size of the pickle.
Pickle parse_pickle(std::string_view bytes, const std::string& name);
constexpr int kMaxNesting = 1000;  // as Python's recursion limit

// A pickle of protocol 2. A value that several others refer to is one object again. Throws
// UsageError for texts that are not UTF-8, and for bytes and sets, which the protocol does not
// have.
std::string write_pickle(const Pickle& pickle);

}  // namespace paceline::checkpoint
