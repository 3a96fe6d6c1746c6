#include "checkpoint/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

using nlohmann::ordered_json;

static_assert(std::endian::native == std::endian::little, "as in the file");

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kAlignment = 64;
constexpr const char* kMetadata = "__metadata__";

constexpr std::array<std::pair<std::string_view, int>, 22> kTypes{{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

// The members of an entry that have come.
struct Draft {
  std::optional<std::string> dtype;
  std::optional<std::vector<std::uint64_t>> shape;
  std::optional<std::vector<std::uint64_t>> offsets;
};

// Reads {"NAME": {"dtype": TEXT, "shape": [N...], "data_offsets": [BEGIN, END]}, ...,
// "__metadata__": {TEXT: TEXT, ...}} and nothing else. nlohmann::json itself would keep the last of
// several equal names.
class Reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  // Why the parse ended: about `subject()`.
  const std::string& problem() const { return problem_; }
  std::string subject() const { return name_.empty() ? "the header" : "tensor '" + name_ + "'"; }

  std::map<std::string, Draft> drafts;
  std::map<std::string, std::string> metadata;

  bool start_object(std::size_t /*elements*/) override {
    if (place_ == Place::start) return enter(Place::top);
    if (place_ != Place::top) return refuse("has an object where none belongs");
    if (name_ == kMetadata) return enter(Place::metadata);
    return enter(Place::entry);
  }
  bool end_object() override {
    place_ = place_ == Place::top ? Place::end : Place::top;
    if (place_ == Place::top) name_.clear();
    return true;
  }
  bool key(string_t& text) override {
    if (place_ == Place::top) {
      name_ = text;
      const bool is_new =
          text == kMetadata ? !std::exchange(has_metadata_, true) : drafts.try_emplace(text).second;
      return is_new || refuse("occurs twice");
    }
    member_ = text;
    if (place_ == Place::metadata) {
      return !metadata.contains(text) || refuse(fmt::format("has '{}' twice", text));
    }
    Draft& draft = drafts[name_];
    const bool is_new = text == "dtype"          ? !draft.dtype
                        : text == "shape"        ? !draft.shape
                        : text == "data_offsets" ? !draft.offsets
                                                 : false;
    return is_new || refuse(fmt::format("has an unknown member '{:.40}', or has it twice", text));
  }
  bool string(string_t& text) override {
    if (place_ == Place::metadata) {
      metadata[member_] = std::move(text);
      return true;
    }
    if (place_ != Place::entry || member_ != "dtype")
      return refuse("has a text where none belongs");
    drafts[name_].dtype = std::move(text);
    return true;
  }
  bool start_array(std::size_t /*elements*/) override {
    if (place_ != Place::entry || member_ == "dtype")
      return refuse("has a list where none belongs");
    list().emplace();
    return enter(Place::list);
  }
  bool end_array() override { return enter(Place::entry); }
  bool number_unsigned(number_unsigned_t number) override {
    if (place_ != Place::list) return refuse("has a number where none belongs");
    list()->push_back(number);
    return true;
  }
  bool number_integer(number_integer_t number) override {
    return refuse(fmt::format("has the number {}, which must not be negative", number));
  }
  bool number_float(number_float_t /*number*/, const string_t& text) override {
    return refuse(fmt::format("has the number {:.40}, which is no integer of 64 bits", text));
  }
  bool null() override { return refuse("has null where none belongs"); }
  bool boolean(bool /*value*/) override { return refuse("has a boolean where none belongs"); }
  bool binary(binary_t& /*value*/) override { return refuse("has binary data"); }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    name_.clear();
    return refuse(fmt::format("is no JSON at byte {}", kLengthBytes + position));
  }

 private:
  enum class Place { start, top, entry, metadata, list, end };

  std::optional<std::vector<std::uint64_t>>& list() {
    Draft& draft = drafts[name_];
    return member_ == "shape" ? draft.shape : draft.offsets;
  }
  bool enter(Place place) {
    place_ = place;
    return true;
  }
  bool refuse(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  Place place_ = Place::start;
  std::string name_;    // of the tensor
  std::string member_;  // of it
  bool has_metadata_ = false;
  std::string problem_;
};

class Parser {
 public:
  Parser(std::string_view file, const std::string& path) : file_(file), path_(path) {}

  SafetensorsHeader parse() {
    data_ = find_data();
    Reader reader;
    const std::string_view text = file_.substr(kLengthBytes, data_ - kLengthBytes);
    if (text.front() != '{') fail("the header does not begin with '{'");
    // The JSON library takes it for the end.
    if (text.find('\0') != text.npos) fail("the header contains a NUL");
    if (!nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) {
      fail(reader.subject() + " " + reader.problem());
    }
    SafetensorsHeader header;
    header.metadata = std::move(reader.metadata);
    for (auto& [name, draft] : reader.drafts) header.tensors.push_back(make_entry(name, draft));
    check_layout(header.tensors);
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw CorruptFile(fmt::format("{}: {}", path_, why));
  }

  // Where the tensors' bytes begin.
  std::uint64_t find_data() const {
    std::uint64_t length = 0;
    if (file_.size() < kLengthBytes) {
      fail(
          fmt::format("not a safetensors file: it has {} bytes, fewer than the {} of the header's "
                      "size (at byte 0)",
                      file_.size(), kLengthBytes));
    }
    std::memcpy(&length, file_.data(), sizeof(length));
    if (length > kMaxHeader || length == 0) {
      fail(
          fmt::format("not a safetensors file: its header would have {} bytes; 1 to {} are allowed "
                      "(at byte 0)",
                      length, kMaxHeader));
    }
    if (length > file_.size() - kLengthBytes) {
      fail(fmt::format("the header has {} bytes, and the file ends after {} (at byte {})", length,
                       file_.size() - kLengthBytes, file_.size()));
    }
    return kLengthBytes + length;
  }

  SafetensorsEntry make_entry(const std::string& name, Draft& draft) const {
    const auto refuse = [&](const std::string& why) {
      fail(fmt::format("tensor '{}' {}", name, why));
    };
    if (!draft.dtype || !draft.shape || !draft.offsets || draft.offsets->size() != 2) {
      refuse("needs a dtype, a shape and two data_offsets");
    }
    const int bits = bits_of(*draft.dtype);
    if (bits == 0) refuse(fmt::format("has the unknown type '{:.40}'", *draft.dtype));
    const std::uint64_t begin = draft.offsets->front();
    const std::uint64_t end = draft.offsets->back();
    if (begin > end || end > file_.size() - data_) {
      refuse(fmt::format("has the bytes {} to {}, of {} that follow the header", begin, end,
                         file_.size() - data_));
    }
    SafetensorsEntry entry{name, *draft.dtype, {}, data_ + begin, end - begin};
    constexpr auto kMost = std::uint64_t{std::numeric_limits<std::int64_t>::max()};
    const bool is_empty = std::ranges::count(*draft.shape, std::uint64_t{0}) > 0;
    std::uint64_t elements = is_empty ? 0 : 1;
    for (const std::uint64_t extent : *draft.shape) {
      if (extent > kMost || (!is_empty && extent > kMost / elements)) refuse("is too large");
      if (!is_empty) elements *= extent;
      entry.shape.push_back(static_cast<std::int64_t>(extent));
    }
    const auto per_element = static_cast<std::uint64_t>(bits);
    if (elements > kMost / per_element || elements * per_element % 8 != 0 ||
        elements * per_element / 8 != entry.size) {
      refuse(fmt::format("has {} bytes, which {} elements of {} do not fill", entry.size, elements,
                         entry.dtype));
    }
    return entry;
  }

  void check_layout(std::vector<SafetensorsEntry>& tensors) const {
    std::ranges::sort(tensors, [](const auto& a, const auto& b) {
      return std::pair(a.begin, a.size) < std::pair(b.begin, b.size);
    });
    std::uint64_t end = data_;
    for (const SafetensorsEntry& tensor : tensors) {
      if (tensor.begin != end) {
        fail(fmt::format("tensor '{}' begins at byte {}, and the one before ends at byte {}",
                         tensor.name, tensor.begin, end));
      }
      end += tensor.size;
    }
    if (end != file_.size()) {
      fail(fmt::format("{} bytes belong to no tensor (at byte {})", file_.size() - end, end));
    }
  }

  std::string_view file_;
  const std::string& path_;
  std::uint64_t data_ = 0;
};

std::string dump(const ordered_json& value) {
  try {
    return value.dump();
  } catch (const ordered_json::type_error&) {
    throw UsageError("a safetensors file has texts in UTF-8 only: " +
                     value.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  }
}

}  // namespace

int bits_of(std::string_view dtype) {
  const auto* const found =
      std::ranges::find(kTypes, dtype, &std::pair<std::string_view, int>::first);
  return found == kTypes.end() ? 0 : found->second;
}

SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& path) {
  return Parser(file, path).parse();
}

std::string make_safetensors_header(const SafetensorsHeader& header) {
  std::string text = "{";
  const auto add = [&](const std::string& name, const ordered_json& value) {
    text += fmt::format("{}{}:{}", text.size() == 1 ? "" : ",", dump(name), dump(value));
  };
  if (!header.metadata.empty()) add(kMetadata, header.metadata);
  std::uint64_t end = 0;
  for (const SafetensorsEntry& tensor : header.tensors) {
    add(tensor.name, {{"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"data_offsets", {end, end + tensor.size}}});
    end += tensor.size;
  }
  text += '}';
  text.resize(
      (kLengthBytes + text.size() + kAlignment - 1) / kAlignment * kAlignment - kLengthBytes, ' ');
  const std::uint64_t length = text.size();
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof(length));
  return bytes + text;
}

}  // namespace paceline::checkpoint
