#include "optim/state_archive.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <utility>

#include <paceline/error.h>

namespace paceline::optim {
namespace {

// The number in a tensor of one element; any other value as it is.
at::IValue number_of(const at::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().numel() != 1) {
    return value;
  }
  return value.toTensor().item();
}

}  // namespace

GenericDict empty_state() {
  return GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

GenericList empty_list() {
  return GenericList(c10::AnyType::get());
}

StateArchive::StateArchive(std::string owner, const at::IValue& state)
    : owner_(std::move(owner)), reads_(true), dict_(empty_state()) {
  if (!state.isGenericDict()) {
    reject(fmt::format("the state is a {} and not a dict", state.tagKind()));
  }
  dict_ = state.toGenericDict();
}

at::IValue StateArchive::at(const char* name) const {
  const auto found = dict_.find(name);
  if (found != dict_.end()) return found->value();
  std::vector<std::string> names;
  for (const auto& one : dict_) {
    if (one.key().isString()) names.push_back(one.key().toStringRef());
  }
  reject(fmt::format("the state has no '{}'; it has: {}", name, fmt::join(names, ", ")));
}

void StateArchive::reject(const std::string& why) const {
  throw Error(fmt::format("load_state_dict of {0}: {1}. Load what state_dict of a {0} returned",
                          owner_, why));
}

void StateArchive::reject_type(const char* name, const at::IValue& value,
                               const char* expected) const {
  reject(fmt::format("'{}' has a {}, and must have {}", name, value.tagKind(), expected));
}

void StateArchive::read(const char* name, const at::IValue& value, double& member) const {
  const at::IValue number = number_of(value);
  if (!number.isDouble() && !number.isInt()) reject_type(name, value, "a number");
  member = number.isDouble() ? number.toDouble() : static_cast<double>(number.toInt());
  if (!std::isfinite(member)) reject(fmt::format("'{}' has {}, which is not finite", name, member));
}

void StateArchive::read(const char* name, const at::IValue& value, std::int64_t& member) const {
  constexpr double kLimit = 9007199254740992;  // 2^53: below it, a double has every whole number
  const at::IValue number = number_of(value);
  if (number.isInt()) {
    member = number.toInt();
  } else if (number.isDouble() && std::abs(number.toDouble()) < kLimit &&
             std::trunc(number.toDouble()) == number.toDouble()) {
    member = static_cast<std::int64_t>(number.toDouble());
  } else {
    reject_type(name, value, "a whole number");
  }
}

void StateArchive::read(const char* name, const at::IValue& value, bool& member) const {
  if (!value.isBool()) reject_type(name, value, "a bool");
  member = value.toBool();
}

void StateArchive::read(const char* name, const at::IValue& value, std::string& member) const {
  if (!value.isString()) reject_type(name, value, "a string");
  member = value.toStringRef();
}

void StateArchive::read(const char* name, const at::IValue& value,
                        std::map<std::int64_t, std::int64_t>& member) const {
  if (!value.isGenericDict()) reject_type(name, value, "a dict");
  std::map<std::int64_t, std::int64_t> entries;
  for (const auto& one : value.toGenericDict()) {
    std::int64_t key = 0;
    read(name, one.key(), key);
    read(name, one.value(), entries[key]);
  }
  member = std::move(entries);
}

at::IValue StateArchive::value_of(const std::map<std::int64_t, std::int64_t>& member) {
  GenericDict dict = empty_state();
  for (const auto& [key, value] : member) dict.insert(key, value);
  return dict;
}

}  // namespace paceline::optim
