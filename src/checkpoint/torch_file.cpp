#include "checkpoint/torch_file.h"

#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "checkpoint/generic_dict.h"
#include "checkpoint/pickle.h"
#include "checkpoint/pickled_tensor.h"

namespace paceline {
namespace checkpoint {
namespace {

using Kind = PickleValue::Kind;
using caffe2::serialize::PyTorchStreamReader;

constexpr std::string_view kZip = "PK\3\4";
// The pickled number with which files of PyTorch before 1.6 begin.
constexpr std::string_view kLegacy = "\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";

class MappedAdapter final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit MappedAdapter(std::shared_ptr<base::MappedFile> file) : file_(std::move(file)) {}
  std::size_t size() const override { return file_->content().size(); }
  std::size_t read(std::uint64_t position, void* buffer, std::size_t count,
                   const char* /*what*/) const override {
    const std::string_view content = file_->content();
    if (position > content.size()) return 0;
    const std::string_view part = content.substr(position, count);
    std::memcpy(buffer, part.data(), part.size());
    return part.size();
  }

 private:
  std::shared_ptr<base::MappedFile> file_;
};

// Where keys want to be in the table of a c10::Dict: the first bits of these numbers.
class KeyPlaces {
 public:
  void add(const at::IValue& key) {
    constexpr std::uint64_t kMultiplier = 11400714819323198485U;  // of c10's table
    keys_.push_back(c10::detail::DictKeyHash()(key) * kMultiplier);
  }

  // How many places the table will have, or more than `most`. It doubles until at most half of them
  // are in use, and until no key has to go farther than log2(places) from the place that it wants:
  // a few keys that want to be side by side in a table of any size would take all memory.
  std::uint64_t table_size(std::uint64_t most) {
    std::ranges::sort(keys_);
    constexpr int kLeast = 3;
    for (int bits = kLeast;; ++bits) {
      const std::uint64_t places = std::uint64_t{1} << bits;
      if (places > most || (keys_.size() <= places / 2 && longest_way(bits) < std::max(4, bits))) {
        return places;
      }
    }
  }

 private:
  std::int64_t longest_way(int bits) const {
    std::int64_t longest = 0;
    std::int64_t next = 0;  // the first place that is free
    for (const std::uint64_t key : keys_) {
      const auto wanted = static_cast<std::int64_t>(key >> (64 - bits));
      next = std::max(next, wanted);
      longest = std::max(longest, next - wanted);
      ++next;
    }
    return longest;
  }

  std::vector<std::uint64_t> keys_;
};

class TorchFileReader {
 public:
  TorchFileReader(std::shared_ptr<base::MappedFile> file, std::string path, c10::Device device,
                  StorageMemory memory)
      : file_(std::move(file)),
        path_(std::move(path)),
        device_(device),
        memory_(memory),
        archive_(std::make_shared<MappedAdapter>(file_)) {}

  at::IValue read() {
    if (archive_.hasRecord("constants.pkl")) {
      throw UsageError(
          fmt::format("{}: is a TorchScript program, or was written by torch::save in C++: use "
                      "torch::jit::load or torch::load",
                      path_));
    }
    if (archive_.hasRecord("byteorder") && record("byteorder") != "little") {
      throw UsageError(fmt::format(
          "{}: was written on a big-endian machine: load and save it in Python", path_));
    }
    pickle_size_ = archive_.getRecordSize("data.pkl");
    const Pickle pickle = parse_pickle(record("data.pkl"), path_ + ": data.pkl");
    return convert(*pickle.root);
  }

 private:
  // It may be compressed, but not so that a small file takes all memory.
  std::string record(const std::string& name) {
    constexpr std::size_t kMostCompression = 16;
    constexpr std::size_t kSmall = std::size_t{1} << 20;
    const std::size_t unpacked = archive_.getRecordSize(name);
    if (unpacked / kMostCompression > file_->content().size() + kSmall) {
      throw CorruptFile(fmt::format("{}: {} has {} bytes, in a file of {}", path_, name, unpacked,
                                    file_->content().size()));
    }
    const auto [data, size] = archive_.getRecord(name);
    return {static_cast<const char*>(data.get()), size};
  }

  // What several values refer to is converted once.
  const at::IValue& convert(const PickleValue& value) {
    const auto found = converted_.find(&value);
    if (found != converted_.end()) return found->second;
    at::IValue made = make(value);
    return converted_.emplace(&value, std::move(made)).first->second;
  }

  at::IValue make(const PickleValue& value) {
    switch (value.kind) {
      case Kind::none:
        return {};
      case Kind::boolean:
        return value.boolean;
      case Kind::integer:
        return value.integer;
      case Kind::real:
        return value.real;
      case Kind::text:
      case Kind::bytes:
        return value.text;
      case Kind::list:
      case Kind::set:
        return list(value.elements);
      case Kind::tuple:
        return c10::ivalue::Tuple::create(values(value.elements));
      case Kind::dict:
        return dict(value.items);
      case Kind::global:
        if (const auto dtype = dtype_of(value)) {
          return static_cast<std::int64_t>(c10::getStringToDtypeMap().at(*dtype));
        }
        return value.text;
      case Kind::persistent:
        throw UsageError(fmt::format("{}: has a storage outside of a tensor", path_));
      case Kind::call:
        break;
    }
    if (const auto tensor = tensor_of(value, path_)) return make_tensor(*tensor);
    return make_object(value);
  }

  at::IValue make_object(const PickleValue& value) {
    std::string function = value.callee->text;
    // The names of Python 2, which protocol 2 uses.
    constexpr std::string_view kOldBuiltins = "__builtin__.";
    if (function.starts_with(kOldBuiltins)) {
      function = "builtins." + function.substr(kOldBuiltins.size());
    }
    const auto& arguments = value.arguments->elements;
    const auto argument = [&](std::size_t i, Kind kind) -> const PickleValue& {
      if (i < arguments.size() && arguments[i]->kind == kind) return *arguments[i];
      throw CorruptFile(fmt::format("{}: calls {} with the wrong arguments", path_, function));
    };
    if (function == "collections.OrderedDict" || function == "collections.Counter" ||
        function == "collections.defaultdict") {
      auto items = value.items;
      if (function == "collections.Counter" && !arguments.empty()) {
        items = argument(0, Kind::dict).items;
      } else if (function == "collections.OrderedDict" && !arguments.empty()) {
        for (const auto* const pair : argument(0, Kind::list).elements) {
          if (pair->elements.size() != 2) argument(1, Kind::none);
          items.emplace_back(pair->elements[0], pair->elements[1]);
        }
      }
      return dict(items);
    }
    if (function == "torch.Size") return convert(argument(0, Kind::tuple));
    if (function == "builtins.set" || function == "builtins.frozenset") {
      if (arguments.empty()) return list({});
      return list(argument(0, Kind::list).elements);
    }
    if (function == "builtins.complex") {
      return c10::complex<double>(argument(0, Kind::real).real, argument(1, Kind::real).real);
    }
    if (function == "_codecs.encode") return latin1_of(argument(0, Kind::text).text);
    if (function == "builtins.bytes" && arguments.empty()) return "";
    if (function == "builtins.bytearray") {
      if (arguments.empty()) return "";
      const PickleValue& content = *arguments[0];
      return content.kind == Kind::text ? latin1_of(content.text) : convert(content);
    }
    if (function == "torch.device") {
      std::string device = argument(0, Kind::text).text;
      if (arguments.size() > 1) device += fmt::format(":{}", argument(1, Kind::integer).integer);
      return at::Device(device);
    }
    return record_of(value);
  }

  // An object of a class that is not known here.
  at::IValue record_of(const PickleValue& value) {
    auto items = value.items;
    const PickleValue* const state = value.state;
    if (state != nullptr && state->kind == Kind::dict) {
      items.insert(items.end(), state->items.begin(), state->items.end());
    }
    auto record = dict(items);
    record.insert("__class__", value.callee->text);
    if (!value.arguments->elements.empty()) record.insert("__args__", convert(*value.arguments));
    if (!value.appended.empty()) record.insert("__list__", list(value.appended));
    if (state != nullptr && state->kind != Kind::dict) record.insert("__state__", convert(*state));
    return record;
  }

  std::vector<at::IValue> values(const std::vector<const PickleValue*>& elements) {
    charge(elements.size());
    std::vector<at::IValue> all;
    for (const auto* const element : elements) all.push_back(convert(*element));
    return all;
  }
  // Each element takes a byte of the pickle, unless calls share their arguments: then many small
  // calls would make many large values.
  void charge(std::size_t elements) {
    elements_ += elements;
    if (elements_ > pickle_size_) {
      throw CorruptFile(fmt::format("{}: data.pkl makes more values than it has bytes", path_));
    }
  }
  c10::impl::GenericList list(const std::vector<const PickleValue*>& elements) {
    c10::impl::GenericList all(c10::AnyType::get());
    for (at::IValue& value : values(elements)) all.push_back(std::move(value));
    return all;
  }
  GenericDict dict(const std::vector<std::pair<const PickleValue*, const PickleValue*>>& items) {
    charge(2 * items.size());
    KeyPlaces places;
    for (const auto& [key, value] : items) {
      if (key->kind == Kind::real && std::isnan(key->real)) {
        throw UsageError(fmt::format("{}: has a dict with the key NaN", path_));
      }
      switch (key->kind) {
        case Kind::boolean:
        case Kind::integer:
        case Kind::real:
        case Kind::text:
        case Kind::bytes:
          places.add(convert(*key));
          break;
        default:
          throw UsageError(
              fmt::format("{}: has a dict with keys that are neither texts nor numbers", path_));
      }
    }
    // A pickle has at least 3 bytes for each key, and a table seldom 8 places.
    constexpr std::size_t kPlacesForByte = 8;
    constexpr std::size_t kSmall = std::size_t{1} << 20;  // 64 MB
    const std::size_t most = kSmall + kPlacesForByte * pickle_size_;
    places_ += places.table_size(most);
    if (places_ > most) {
      throw CorruptFile(fmt::format("{}: has dicts whose keys need too much memory", path_));
    }
    GenericDict all = empty_dict();
    for (const auto& [key, value] : items) all.insert_or_assign(convert(*key), convert(*value));
    return all;
  }

  at::Tensor make_tensor(const PickledTensor& what) {
    const at::ScalarType type = c10::getStringToDtypeMap().at(what.dtype);
    const auto size = what.storage_size * static_cast<std::uint64_t>(bytes_of(what.dtype));
    const std::uint64_t unpacked = archive_.getRecordSize("data/" + what.storage);
    // More only if that needs no memory: then it is not compressed.
    if (unpacked < size || unpacked > std::max<std::uint64_t>(size, file_->content().size())) {
      throw CorruptFile(fmt::format("{}: data/{} has {} bytes in place of {}", path_, what.storage,
                                    unpacked, size));
    }
    const at::Tensor& data = storage(what.storage);
    at::Tensor tensor = at::empty({0}, at::TensorOptions(type).device(device_));
    tensor.set_(data.storage(), what.offset, what.sizes, what.strides);
    if (what.is_conjugate) tensor = tensor.conj();
    if (what.is_negative) tensor = tensor._neg_view();
    if (what.requires_grad) tensor.set_requires_grad(true);
    return tensor;
  }

  // Its bytes. Tensors that shared a storage share it again.
  const at::Tensor& storage(const std::string& name) {
    const auto found = storages_.find(name);
    if (found != storages_.end()) return found->second;
    auto [data, size] = storage_bytes("data/" + name);
    c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(data));
    at::Tensor bytes = at::empty({0}, at::kByte);
    bytes.set_(std::move(storage), 0, {static_cast<std::int64_t>(size)}, {1});
    return storages_.emplace(name, bytes.to(device_)).first->second;
  }

  std::tuple<at::DataPtr, std::size_t> storage_bytes(const std::string& record) {
    if (memory_ == StorageMemory::mapped) {
      if (auto mapped = mapped_bytes(record)) return std::move(*mapped);
    }
    return archive_.getRecord(record);
  }

  // Unless they are compressed, or not aligned for all types.
  std::optional<std::tuple<at::DataPtr, std::size_t>> mapped_bytes(const std::string& record) {
    constexpr std::size_t kHeader = 30;
    constexpr std::size_t kFlags = 6;   // their position there
    constexpr std::size_t kMethod = 8;  // 0 is no compression
    const std::string_view content = file_->content();
    const std::size_t header = archive_.getRecordHeaderOffset(record);
    if (content.size() < kHeader || header > content.size() - kHeader) return std::nullopt;
    const std::size_t begin = archive_.getRecordOffset(record);
    const std::size_t size = archive_.getRecordSize(record);
    const bool is_encrypted = (content[header + kFlags] & 1) != 0;
    const bool is_stored = content.substr(header).starts_with(kZip) && !is_encrypted &&
                           content[header + kMethod] == 0 && content[header + kMethod + 1] == 0;
    if (!is_stored || begin % alignof(std::max_align_t) != 0 || begin > content.size() ||
        size > content.size() - begin) {
      return std::nullopt;
    }
    auto* const owner = new std::shared_ptr<base::MappedFile>(file_);
    return std::tuple(
        at::DataPtr(
            file_->data() + begin, owner,
            [](void* one) { delete static_cast<std::shared_ptr<base::MappedFile>*>(one); },
            at::kCPU),
        size);
  }

  static std::string latin1_of(const std::string& utf8) {
    std::string bytes;
    for (std::size_t i = 0; i < utf8.size(); ++i) {
      const auto code = static_cast<unsigned char>(utf8[i]);
      const bool is_pair = (code & 0xfe) == 0xc2 && i + 1 < utf8.size();
      bytes += is_pair ? static_cast<char>((code << 6) | (utf8[++i] & 0x3f)) : utf8[i];
    }
    return bytes;
  }

  std::shared_ptr<base::MappedFile> file_;
  std::string path_;
  c10::Device device_;
  StorageMemory memory_;
  std::size_t pickle_size_ = 0;
  std::size_t elements_ = 0;  // of all lists, tuples and dicts so far
  std::size_t places_ = 0;    // in the tables of all dicts so far
  PyTorchStreamReader archive_;
  std::unordered_map<const PickleValue*, at::IValue> converted_;
  std::unordered_map<std::string, at::Tensor> storages_;
};

}  // namespace

void check_device(c10::Device device) {
  try {
    std::ignore = at::empty({0}, device);
  } catch (const c10::Error& error) {
    throw UsageError(
        fmt::format("map_location {}: {}", device.str(), error.what_without_backtrace()));
  }
}

bool is_torch_file(std::string_view content) {
  return content.starts_with(kZip) || content.starts_with(kLegacy);
}

at::IValue read_torch_file(const std::shared_ptr<base::MappedFile>& file,
                           const std::filesystem::path& path, c10::Device device,
                           StorageMemory memory) {
  check_device(device);
  const std::string_view content = file->content();
  if (content.starts_with(kLegacy)) {
    throw UsageError(
        fmt::format("{}: is in the format of PyTorch before 1.6: load it in Python, and save it "
                    "without _use_new_zipfile_serialization=False",
                    path.string()));
  }
  if (!content.starts_with(kZip)) {
    throw CorruptFile(fmt::format("{}: was not written by torch.save", path.string()));
  }
  try {
    return TorchFileReader(file, path.string(), device, memory).read();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    throw CorruptFile(fmt::format("{}: is truncated or damaged: {}", path.string(), error.msg()));
  } catch (const std::bad_alloc&) {
    throw CorruptFile(fmt::format("{}: needs more memory than there is", path.string()));
  } catch (const std::exception& error) {
    throw CorruptFile(fmt::format("{}: {}", path.string(), error.what()));
  }
}

}  // namespace checkpoint

at::IValue pickle_load(const std::filesystem::path& path, c10::Device map_location) {
  return checkpoint::read_torch_file(std::make_shared<base::MappedFile>(path), path, map_location,
                                     checkpoint::StorageMemory::copied);
}

}  // namespace paceline
