#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>

#include <paceline/error.h>

#include "checkpoint/pickle.h"
#include "checkpoint/pickle_opcode.h"

namespace paceline::checkpoint {
namespace {

using Kind = PickleValue::Kind;

constexpr int kNewestProtocol = 5;

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
    std::memcpy(&number, bytes.data(), bytes.size());
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

}  // namespace

Pickle parse_pickle(std::string_view bytes, const std::string& name) {
  return PickleParser(bytes, name).parse();
}

}  // namespace paceline::checkpoint
