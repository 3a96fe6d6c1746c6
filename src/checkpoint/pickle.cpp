#include "checkpoint/pickle.h"

#include <fmt/format.h>

#include <bit>
#include <limits>
#include <unordered_map>

#include <paceline/error.h>

#include "base/utf8.h"
#include "checkpoint/pickle_opcode.h"

namespace paceline::checkpoint {
namespace {

using Kind = PickleValue::Kind;

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
    if (text.size() > std::numeric_limits<std::uint32_t>::max()) {
      throw UsageError("a pickle has texts of less than 4 GiB only");
    }
    if (!base::is_utf8(text)) {
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

std::string write_pickle(const Pickle& pickle) {
  return PickleWriter().write(*pickle.root);
}

}  // namespace paceline::checkpoint
