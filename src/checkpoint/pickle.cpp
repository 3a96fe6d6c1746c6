#include "checkpoint/pickle.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <unordered_map>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

using Kind = PickleValue::Kind;

static_assert(std::endian::native == std::endian::little, "as in pickles");

constexpr int kNewestProtocol = 5;

enum class Opcode : unsigned char {
  proto = 0x80,
  frame = 0x95,
  stop = '.',
  mark = '(',
  pop = '0',
  pop_mark = '1',
  none = 'N',
  newtrue = 0x88,
  newfalse = 0x89,
  binint = 'J',
  binint1 = 'K',
  binint2 = 'M',
  long1 = 0x8a,
  long4 = 0x8b,
  binfloat = 'G',
  short_binstring = 'U',
  binstring = 'T',
  short_binbytes = 'C',
  binbytes = 'B',
  binbytes8 = 0x8e,
  bytearray8 = 0x96,
  short_binunicode = 0x8c,
  binunicode = 'X',
  binunicode8 = 0x8d,
  empty_list = ']',
  append = 'a',
  appends = 'e',
  empty_tuple = ')',
  tuple1 = 0x85,
  tuple2 = 0x86,
  tuple3 = 0x87,
  tuple = 't',
  empty_dict = '}',
  setitem = 's',
  setitems = 'u',
  empty_set = 0x8f,
  additems = 0x90,
  frozenset = 0x91,
  binput = 'q',
  long_binput = 'r',
  memoize = 0x94,
  binget = 'h',
  long_binget = 'j',
  global = 'c',
  stack_global = 0x93,
  reduce = 'R',
  newobj = 0x81,
  newobj_ex = 0x92,
  build = 'b',
  binpersid = 'Q',
};

class PickleParser {
 public:
  PickleParser(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  Pickle parse() {
    if (bytes_.empty() || Opcode(bytes_.front()) != Opcode::proto) {
      corrupt("is not of protocol 2 or later");
    }
    while (!pickle_.root) step();
    if (position_ != bytes_.size()) corrupt("continues after its end");
    check_nesting();
    return std::move(pickle_);
  }

 private:
  void step() {
    begin_ = position_;
    const auto opcode = Opcode(read<unsigned char>());
    switch (opcode) {
      case Opcode::proto:
        if (read<unsigned char>() > kNewestProtocol) corrupt("is of a protocol later than 5");
        return;
      case Opcode::frame:
        read<std::uint64_t>();
        return;
      case Opcode::stop:
        pickle_.root = pop();
        return;
      case Opcode::mark:
        marks_.push_back(stack_.size());
        return;
      case Opcode::pop:
        pop();
        return;
      case Opcode::pop_mark:
        pop_to_mark();
        return;
      case Opcode::none:
        push({});
        return;
      case Opcode::newtrue:
      case Opcode::newfalse:
        push({.kind = Kind::boolean, .boolean = opcode == Opcode::newtrue});
        return;
      case Opcode::binint:
        return push_integer(read<std::int32_t>());
      case Opcode::binint1:
        return push_integer(read<std::uint8_t>());
      case Opcode::binint2:
        return push_integer(read<std::uint16_t>());
      case Opcode::long1:
        return push_integer(long_integer(read<std::uint8_t>()));
      case Opcode::long4:
        return push_integer(long_integer(read<std::uint32_t>()));
      case Opcode::binfloat:
        push({.kind = Kind::real, .real = big_endian_double()});
        return;
      case Opcode::short_binstring:
      case Opcode::short_binunicode:
        return push_text(Kind::text, read<std::uint8_t>());
      case Opcode::binstring:
      case Opcode::binunicode:
        return push_text(Kind::text, read<std::uint32_t>());
      case Opcode::binunicode8:
        return push_text(Kind::text, read<std::uint64_t>());
      case Opcode::short_binbytes:
        return push_text(Kind::bytes, read<std::uint8_t>());
      case Opcode::binbytes:
        return push_text(Kind::bytes, read<std::uint32_t>());
      case Opcode::binbytes8:
      case Opcode::bytearray8:
        return push_text(Kind::bytes, read<std::uint64_t>());
      case Opcode::empty_list:
        push({.kind = Kind::list});
        return;
      case Opcode::empty_tuple:
        push({.kind = Kind::tuple});
        return;
      case Opcode::empty_dict:
        push({.kind = Kind::dict});
        return;
      case Opcode::empty_set:
        push({.kind = Kind::set});
        return;
      case Opcode::tuple:
        return push_sequence(Kind::tuple, pop_to_mark());
      case Opcode::frozenset:
        return push_sequence(Kind::set, pop_to_mark());
      case Opcode::tuple1:
        return push_sequence(Kind::tuple, pop_several(1));
      case Opcode::tuple2:
        return push_sequence(Kind::tuple, pop_several(2));
      case Opcode::tuple3:
        return push_sequence(Kind::tuple, pop_several(3));
      case Opcode::setitem:
        return set_items(pop_several(2));
      case Opcode::setitems:
        return set_items(pop_to_mark());
      case Opcode::append:
        return append(pop_several(1), Kind::list);
      case Opcode::appends:
        return append(pop_to_mark(), Kind::list);
      case Opcode::additems:
        return append(pop_to_mark(), Kind::set);
      case Opcode::binput:
        memo_[read<std::uint8_t>()] = top();
        return;
      case Opcode::long_binput:
        memo_[read<std::uint32_t>()] = top();
        return;
      case Opcode::memoize:
        memo_[static_cast<std::uint32_t>(memo_.size())] = top();
        return;
      case Opcode::binget:
        return push_from_memo(read<std::uint8_t>());
      case Opcode::long_binget:
        return push_from_memo(read<std::uint32_t>());
      case Opcode::global: {
        const std::string module = read_line();
        return push_global(module, read_line());
      }
      case Opcode::stack_global: {
        const Values names = pop_several(2);
        if (names[0]->kind != Kind::text || names[1]->kind != Kind::text) {
          corrupt("has a name that is not a text");
        }
        return push_global(names[0]->text, names[1]->text);
      }
      case Opcode::reduce:
      case Opcode::newobj: {
        const Values parts = pop_several(2);
        return push_call(*parts[0], *parts[1]);
      }
      case Opcode::newobj_ex: {
        const Values parts = pop_several(3);
        if (parts[2]->kind != Kind::dict || !parts[2]->items.empty()) {
          unsupported("calls a class with arguments by name");
        }
        return push_call(*parts[0], *parts[1]);
      }
      case Opcode::build: {
        const PickleValue* const state = pop();
        PickleValue& object = *top();
        if (object.kind != Kind::call || object.state)
          corrupt("sets the state of a value that is not an object");
        object.state = state;
        return;
      }
      case Opcode::binpersid:
        return push_sequence(Kind::persistent, pop_several(1));
    }
    unsupported(fmt::format("has the opcode 0x{:02x}", static_cast<int>(opcode)));
  }

  using Values = std::vector<PickleValue*>;

  template <typename Number>
  Number read() {
    Number number{};
    const std::string_view bytes = read_bytes(sizeof(number));
    std::memcpy(&number, bytes.data(), sizeof(number));
    return number;
  }
  std::string_view read_bytes(std::uint64_t count) {
    if (count > bytes_.size() - position_) corrupt("ends too early");
    const std::string_view bytes = bytes_.substr(position_, count);
    position_ += count;
    return bytes;
  }
  std::string read_line() {
    const std::size_t end = bytes_.find('\n', position_);
    if (end == std::string_view::npos) corrupt("ends too early");
    std::string line(read_bytes(end - position_));
    ++position_;
    return line;
  }
  double big_endian_double() {
    auto bits = read<std::uint64_t>();
    bits = __builtin_bswap64(bits);
    return std::bit_cast<double>(bits);
  }
  // Two's complement, of any length.
  std::int64_t long_integer(std::uint64_t size) {
    const std::string_view bytes = read_bytes(size);
    const bool negative = !bytes.empty() && static_cast<signed char>(bytes.back()) < 0;
    std::int64_t integer = negative ? -1 : 0;
    if (bytes.size() > sizeof(integer)) unsupported("has an integer outside of int64");
    std::memcpy(&integer, bytes.data(), bytes.size());
    return integer;
  }

  PickleValue& push(PickleValue value) {
    stack_.push_back(&pickle_.add(std::move(value)));
    return *stack_.back();
  }
  void push_integer(std::int64_t integer) { stack_.push_back(&pickle_.add_integer(integer)); }
  void push_text(Kind kind, std::uint64_t size) {
    stack_.push_back(&pickle_.add_text(kind, std::string(read_bytes(size))));
  }
  void push_sequence(Kind kind, const Values& elements) {
    stack_.push_back(&pickle_.add_sequence(kind, {elements.begin(), elements.end()}));
  }
  void push_global(const std::string& module, const std::string& name) {
    stack_.push_back(&pickle_.add_text(Kind::global, module + "." + name));
  }
  void push_call(const PickleValue& callee, const PickleValue& arguments) {
    if (callee.kind != Kind::global) corrupt("calls a value that is not a class or function");
    if (arguments.kind != Kind::tuple) corrupt("calls a function without a tuple of arguments");
    if (callee.text.ends_with(".getattr") && arguments.elements.size() == 2 &&
        arguments.elements[0]->kind == Kind::global && arguments.elements[1]->kind == Kind::text) {
      // How protocol 2 names a class inside of a class.
      return push_global(arguments.elements[0]->text, arguments.elements[1]->text);
    }
    push({.kind = Kind::call, .callee = &callee, .arguments = &arguments});
  }
  void push_from_memo(std::uint32_t key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) corrupt(fmt::format("refers to value {} of {}", key, memo_.size()));
    stack_.push_back(found->second);
  }

  // Values before a mark stay until it is popped.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  PickleValue* top() const {
    if (stack_.size() <= floor()) corrupt("needs a value where there is none");
    return stack_.back();
  }
  PickleValue* pop() {
    PickleValue* const value = top();
    stack_.pop_back();
    return value;
  }
  Values pop_several(std::size_t count) {
    if (stack_.size() < floor() + count) corrupt("needs a value where there is none");
    return pop_from(stack_.size() - count);
  }
  Values pop_to_mark() {
    if (marks_.empty()) corrupt("needs a mark where there is none");
    const std::size_t begin = marks_.back();
    marks_.pop_back();
    return pop_from(begin);
  }
  Values pop_from(std::size_t begin) {
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(begin);
    Values values(first, stack_.end());
    stack_.erase(first, stack_.end());
    return values;
  }

  void set_items(const Values& items) {
    PickleValue& target = *top();
    if (target.kind != Kind::dict && target.kind != Kind::call) {
      corrupt("sets an item of a value that is not a dict");
    }
    if (items.size() % 2 != 0) corrupt("has a key without a value");
    for (std::size_t i = 0; i < items.size(); i += 2) {
      target.items.emplace_back(items[i], items[i + 1]);
    }
  }
  void append(const Values& values, Kind kind) {
    PickleValue& target = *top();
    if (target.kind != kind && target.kind != Kind::call)
      corrupt("appends to a value that is not a list or set");
    auto& list = target.kind == kind ? target.elements : target.appended;
    list.insert(list.end(), values.begin(), values.end());
  }

  // Null behind the last one. A callee is a global, which has none.
  static const PickleValue* child(const PickleValue& value, std::size_t i) {
    if (value.arguments != nullptr && i-- == 0) return value.arguments;
    if (i < value.elements.size()) return value.elements[i];
    i -= value.elements.size();
    if (i < value.appended.size()) return value.appended[i];
    i -= value.appended.size();
    if (i < 2 * value.items.size()) {
      const auto& [key, stored] = value.items[i / 2];
      return i % 2 == 0 ? key : stored;
    }
    return i == 2 * value.items.size() ? value.state : nullptr;
  }
  // Without recursion, since the nesting may be too deep for it.
  void check_nesting() const {
    struct Visit {
      const PickleValue* value;
      std::size_t next = 0;
      int height = 0;  // over the children so far
    };
    std::unordered_map<const PickleValue*, std::optional<int>> heights;  // none: being visited
    std::vector<Visit> path{{pickle_.root}};
    heights[pickle_.root];
    while (!path.empty()) {
      Visit& visit = path.back();
      if (const auto* const next = child(*visit.value, visit.next)) {
        const auto [found, is_new] = heights.try_emplace(next);
        if (is_new) {
          path.push_back({next});
          continue;
        }
        if (!found->second) unsupported("has a value that contains itself");
        visit.height = std::max(visit.height, *found->second + 1);
        if (visit.height > kMaxNesting) {
          unsupported(fmt::format("is nested deeper than {}", kMaxNesting));
        }
        ++visit.next;
      } else {
        heights[visit.value] = visit.height;
        path.pop_back();
      }
    }
  }

  [[noreturn]] void corrupt(const std::string& why) const {
    throw CorruptFile(fmt::format("{}: the pickle {}, at byte {}", name_, why, begin_));
  }
  [[noreturn]] void unsupported(const std::string& what) const {
    throw UsageError(fmt::format("{}: the pickle {}, at byte {}, which Paceline does not read",
                                 name_, what, begin_));
  }

  std::string_view bytes_;
  const std::string& name_;
  std::size_t position_ = 0;
  std::size_t begin_ = 0;  // of the present opcode
  Pickle pickle_;
  Values stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint32_t, PickleValue*> memo_;
};

class PickleWriter {
 public:
  std::string write(const PickleValue& root) {
    put(Opcode::proto);
    bytes_ += '\x02';
    write_value(root);
    put(Opcode::stop);
    return std::move(bytes_);
  }

 private:
  // NOLINTNEXTLINE(misc-no-recursion): as deep as the value
  void write_value(const PickleValue& value) {
    if (const auto found = memo_.find(&value); found != memo_.end()) {
      put(Opcode::long_binget);
      return put_number(found->second);
    }
    switch (value.kind) {
      case Kind::none:
        return put(Opcode::none);
      case Kind::boolean:
        return put(value.boolean ? Opcode::newtrue : Opcode::newfalse);
      case Kind::integer:
        return write_integer(value.integer);
      case Kind::real:
        put(Opcode::binfloat);
        return put_number(__builtin_bswap64(std::bit_cast<std::uint64_t>(value.real)));
      case Kind::persistent:
        write_value(*value.elements.front());
        return put(Opcode::binpersid);
      case Kind::text:
        put(Opcode::binunicode);
        put_text(value.text);
        break;
      case Kind::bytes:
      case Kind::set:
        throw UsageError("a pickle of protocol 2 has no bytes and no sets");
      case Kind::global: {
        const std::size_t dot = value.text.rfind('.');
        put(Opcode::global);
        bytes_ += value.text.substr(0, dot) + '\n' + value.text.substr(dot + 1) + '\n';
        break;
      }
      case Kind::tuple:
        write_tuple(value.elements);
        break;
      case Kind::list:
        put(Opcode::empty_list);
        memoize(value);
        return write_appended(value.elements);
      case Kind::dict:
        put(Opcode::empty_dict);
        memoize(value);
        return write_items(value.items);
      case Kind::call:
        write_value(*value.callee);
        write_value(*value.arguments);
        put(Opcode::reduce);
        memoize(value);
        write_appended(value.appended);
        write_items(value.items);
        if (value.state) {
          write_value(*value.state);
          put(Opcode::build);
        }
        return;
    }
    memoize(value);
  }

  void write_integer(std::int64_t integer) {
    if (integer == static_cast<std::int32_t>(integer)) {
      put(Opcode::binint);
      return put_number(static_cast<std::int32_t>(integer));
    }
    put(Opcode::long1);
    bytes_ += static_cast<char>(sizeof(integer));
    put_number(integer);
  }
  // NOLINTNEXTLINE(misc-no-recursion)
  void write_tuple(const std::vector<const PickleValue*>& elements) {
    put(Opcode::mark);
    for (const auto* const element : elements) write_value(*element);
    put(Opcode::tuple);
  }
  // NOLINTNEXTLINE(misc-no-recursion)
  void write_appended(const std::vector<const PickleValue*>& values) {
    if (values.empty()) return;
    put(Opcode::mark);
    for (const auto* const value : values) write_value(*value);
    put(Opcode::appends);
  }
  // NOLINTNEXTLINE(misc-no-recursion)
  void write_items(const std::vector<std::pair<const PickleValue*, const PickleValue*>>& items) {
    if (items.empty()) return;
    put(Opcode::mark);
    for (const auto& [key, value] : items) {
      write_value(*key);
      write_value(*value);
    }
    put(Opcode::setitems);
  }

  void put(Opcode opcode) { bytes_ += static_cast<char>(opcode); }
  template <typename Number>
  void put_number(Number number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  void put_text(const std::string& text) {
    try {
      std::ignore = nlohmann::json(text).dump();
    } catch (const nlohmann::json::type_error&) {
      throw UsageError(fmt::format("a pickle has texts in UTF-8 only: {}", text));
    }
    put_number(static_cast<std::uint32_t>(text.size()));
    bytes_ += text;
  }
  void memoize(const PickleValue& value) {
    const auto key = static_cast<std::uint32_t>(memo_.size());
    memo_.emplace(&value, key);
    put(Opcode::long_binput);
    put_number(key);
  }

  std::string bytes_;
  std::unordered_map<const PickleValue*, std::uint32_t> memo_;
};

}  // namespace

PickleValue& Pickle::add_text(Kind kind, std::string text) {
  return add({.kind = kind, .text = std::move(text)});
}

PickleValue& Pickle::add_integer(std::int64_t integer) {
  return add({.kind = Kind::integer, .integer = integer});
}

PickleValue& Pickle::add_sequence(Kind kind, std::vector<const PickleValue*> elements) {
  return add({.kind = kind, .elements = std::move(elements)});
}

PickleValue& Pickle::add_call(const PickleValue& callee,
                              std::vector<const PickleValue*> arguments) {
  const PickleValue& tuple = add_sequence(Kind::tuple, std::move(arguments));
  return add({.kind = Kind::call, .callee = &callee, .arguments = &tuple});
}

Pickle parse_pickle(std::string_view bytes, const std::string& name) {
  return PickleParser(bytes, name).parse();
}

std::string write_pickle(const Pickle& pickle) {
  return PickleWriter().write(*pickle.root);
}

}  // namespace paceline::checkpoint
