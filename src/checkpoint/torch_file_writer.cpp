#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "checkpoint/pickle.h"
#include "checkpoint/pickled_tensor.h"
#include "checkpoint/torch_file.h"
#include "checkpoint/zip_writer.h"

namespace paceline {
namespace checkpoint {
namespace {

using Kind = PickleValue::Kind;

class TorchFileWriter {
 public:
  const PickleValue& convert(const at::IValue& value, int nesting = 0) {
    if (nesting > kMaxNesting) {
      throw UsageError(fmt::format(
          "pickle_save: a value is nested deeper than {}, or contains itself", kMaxNesting));
    }
    const auto several = [&](c10::ArrayRef<at::IValue> values) {
      std::vector<const PickleValue*> all;
      for (const auto& one : values) all.push_back(&convert(one, nesting + 1));
      return all;
    };
    const auto call = [&](const char* function,
                          std::vector<const PickleValue*> arguments) -> const PickleValue& {
      return pickle_.add_call(global(function), std::move(arguments));
    };
    const auto real = [&](double number) {
      return &pickle_.add({.kind = Kind::real, .real = number});
    };
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isNone()) return pickle_.add({});
    if (value.isBool()) return pickle_.add({.kind = Kind::boolean, .boolean = value.toBool()});
    if (value.isInt()) return pickle_.add_integer(value.toInt());
    if (value.isDouble()) return *real(value.toDouble());
    if (value.isString()) return text(value.toStringRef());
    if (value.isList()) return pickle_.add_sequence(Kind::list, several(value.toListRef()));
    if (value.isTuple()) {
      return pickle_.add_sequence(Kind::tuple, several(value.toTupleRef().elements().asArrayRef()));
    }
    if (value.isComplexDouble()) {
      const auto number = value.toComplexDouble();
      return call("builtins.complex", {real(number.real()), real(number.imag())});
    }
    if (value.isDevice()) return call("torch.device", {&text(value.toDevice().str())});
    if (value.isGenericDict()) {
      PickleValue dict{.kind = Kind::dict};
      for (const auto& item : value.toGenericDict()) {
        dict.items.emplace_back(&convert(item.key(), nesting + 1),
                                &convert(item.value(), nesting + 1));
      }
      return pickle_.add(std::move(dict));
    }
    throw UsageError(
        fmt::format("pickle_save: a file cannot contain a {}: convert it to numbers, "
                    "texts, tensors, lists, tuples and dicts",
                    value.tagKind()));
  }

  const PickleValue& convert(const StateDict& state) {
    PickleValue& dict = pickle_.add_call(global("collections.OrderedDict"), {});
    for (const auto& one : state) dict.items.emplace_back(&text(one.key()), &convert(one.value()));
    return dict;
  }

  void write(const PickleValue& root, FileWriter& file) {
    pickle_.root = &root;
    const std::string pickle = write_pickle(pickle_);
    ZipWriter archive(file);
    archive.add("archive/data.pkl", pickle);
    archive.add("archive/byteorder", "little");
    for (std::size_t i = 0; i < storages_.size(); ++i) {
      const at::Tensor bytes = storages_[i].cpu();
      archive.add(fmt::format("archive/data/{}", i),
                  {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
    }
    archive.add("archive/version", "3\n");
    archive.finish();
    file.commit();
  }

 private:
  const PickleValue& text(std::string text) {
    return pickle_.add_text(Kind::text, std::move(text));
  }
  const PickleValue& global(std::string name) {
    return pickle_.add_text(Kind::global, std::move(name));
  }

  const PickleValue& convert(const at::Tensor& given) {
    if (!given.defined()) throw UsageError("a file cannot contain an undefined tensor");
    const auto dtype = std::string(c10::getDtypeNames(given.scalar_type()).first);
    if (given.layout() != at::kStrided || given.is_meta() || bytes_of(dtype) == 0) {
      throw UsageError(fmt::format(
          "a file cannot contain this tensor: {} {} on {}: only dense ones",
          c10::toString(given.scalar_type()),
          given.layout() == at::kStrided ? "dense" : "not dense", given.device().str()));
    }
    const at::Tensor tensor = given.detach().resolve_conj().resolve_neg();
    const auto& storage = tensor.storage();
    const auto [found, is_new] =
        names_.try_emplace(storage.unsafeGetStorageImpl(), Stored{storages_.size(), dtype});
    if (is_new) {
      at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte));
      bytes.set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
      storages_.push_back(std::move(bytes));
    } else if (found->second.dtype != dtype) {
      throw UsageError(fmt::format("a file cannot contain tensors of {} and {} that share memory",
                                   found->second.dtype, dtype));
    }
    return add_tensor(pickle_, {.dtype = dtype,
                                .storage = std::to_string(found->second.number),
                                .storage_size = storage.nbytes() / tensor.itemsize(),
                                .location = tensor.device().str(),
                                .offset = tensor.storage_offset(),
                                .sizes = tensor.sizes().vec(),
                                .strides = tensor.strides().vec(),
                                .requires_grad = given.requires_grad()});
  }

  struct Stored {
    std::size_t number;
    std::string dtype;
  };
  Pickle pickle_;
  std::unordered_map<const c10::StorageImpl*, Stored> names_;
  std::vector<at::Tensor> storages_;  // their bytes; they keep the addresses in use
};

}  // namespace

void write_torch_file(const at::IValue& value, FileWriter& file) {
  TorchFileWriter writer;
  writer.write(writer.convert(value), file);
}

void write_torch_file(const StateDict& state, FileWriter& file) {
  TorchFileWriter writer;
  writer.write(writer.convert(state), file);
}

}  // namespace checkpoint

void pickle_save(const at::IValue& value, const std::filesystem::path& path) {
  checkpoint::FileWriter file(path);
  checkpoint::write_torch_file(value, file);
}

}  // namespace paceline
