#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace paceline::optim {

using GenericDict = c10::impl::GenericDict;
using GenericList = c10::impl::GenericList;

GenericDict empty_state();
GenericList empty_list();

// Reads or writes the members of an object as a dict, with errors that name the member. In a dict
// that is read, a number may be a tensor of one element, as in Python's optimizers, and a whole
// number may be a float.
class StateArchive {
 public:
  // Writes into a new dict.
  explicit StateArchive(std::string owner) : owner_(std::move(owner)), dict_(empty_state()) {}
  // Reads what another wrote. Throws Error if it is not a dict.
  StateArchive(std::string owner, const at::IValue& state);

  bool reads() const { return reads_; }
  const GenericDict& dict() const { return dict_; }
  bool has(const char* name) const { return dict_.contains(name); }

  // The value of this name, which must be there.
  at::IValue at(const char* name) const;
  void insert(const char* name, const at::IValue& value) { dict_.insert_or_assign(name, value); }

  // Reads or writes a member.
  template <typename Member>
  void operator()(const char* name, Member& member) {
    if (reads_) {
      read(name, at(name), member);
    } else {
      insert(name, value_of(member));
    }
  }

  // Throws Error.
  [[noreturn]] void reject(const std::string& why) const;

 private:
  void read(const char* name, const at::IValue& value, double& member) const;
  void read(const char* name, const at::IValue& value, std::int64_t& member) const;
  void read(const char* name, const at::IValue& value, bool& member) const;
  void read(const char* name, const at::IValue& value, std::string& member) const;
  template <typename Element>
  void read(const char* name, const at::IValue& value, std::vector<Element>& member) const {
    if (!value.isList() && !value.isTuple()) reject_type(name, value, "a list");
    std::vector<Element> elements;
    const auto all =
        value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    for (const at::IValue& one : all) read(name, one, elements.emplace_back());
    member = std::move(elements);
  }
  void read(const char* name, const at::IValue& value,
            std::map<std::int64_t, std::int64_t>& member) const;

  static at::IValue value_of(double member) { return member; }
  static at::IValue value_of(std::int64_t member) { return member; }
  static at::IValue value_of(bool member) { return member; }
  static at::IValue value_of(const std::string& member) { return member; }
  template <typename Element>
  static at::IValue value_of(const std::vector<Element>& member) {
    GenericList list = empty_list();
    for (const Element& one : member) list.push_back(value_of(one));
    return list;
  }
  static at::IValue value_of(const std::map<std::int64_t, std::int64_t>& member);

  [[noreturn]] void reject_type(const char* name, const at::IValue& value,
                                const char* expected) const;

  std::string owner_;
  bool reads_ = false;
  GenericDict dict_;
};

}  // namespace paceline::optim
