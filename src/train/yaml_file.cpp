#include "train/yaml_file.h"

#include <paceline/error.h>

#ifdef PACELINE_YAML

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "base/utf8.h"

namespace paceline::train {
namespace {

constexpr int kMaxNesting = 30;
constexpr std::size_t kMaxValues = 10'000;

class YamlReader {
 public:
  explicit YamlReader(std::string path) : path_(std::move(path)) {}

  // NOLINTNEXTLINE(misc-no-recursion): bounded by kMaxNesting
  void read(const YAML::Node& map, const std::string& prefix, int nesting = 0) {
    for (const auto& one : map) {
      // An alias may name a map that contains it, or maps that double in size at each level.
      if (nesting > kMaxNesting || values.size() > kMaxValues) {
        fail(one.first, fmt::format("more than {} levels or {} values", kMaxNesting, kMaxValues));
      }
      if (!one.first.IsScalar()) fail(one.first, "a key must be a text");
      const std::string name = prefix + one.first.Scalar();
      if (one.second.IsMap() && one.second.size() != 0) {
        read(one.second, name + ".", nesting + 1);
        continue;
      }
      if (!names_.insert(name).second) fail(one.first, fmt::format("{} is set twice", name));
      values.push_back({name, texts_of(one.first, one.second, name), one.second.IsSequence(),
                        one.first.Mark().line + 1});
    }
  }

  std::vector<ConfigValue> values;

 private:
  std::vector<std::string> texts_of(const YAML::Node& key, const YAML::Node& node,
                                    const std::string& name) const {
    if (node.IsScalar()) return {text_of(node, name)};
    if (!node.IsSequence()) fail(key, fmt::format("{} has no value", name));
    std::vector<std::string> texts;
    for (const auto& one : node) {
      if (!one.IsScalar()) fail(one, fmt::format("{} has a value that is no text or number", name));
      texts.push_back(text_of(one, name));
    }
    return texts;
  }
  std::string text_of(const YAML::Node& node, const std::string& name) const {
    // yaml-cpp makes invalid bytes of the escapes \N and \_.
    if (!base::is_utf8(node.Scalar())) {
      fail(node,
           fmt::format("{} is not UTF-8: write the character itself instead of \\N or \\_", name));
    }
    return node.Scalar();
  }
  [[noreturn]] void fail(const YAML::Node& at, const std::string& what) const {
    throw UsageError(fmt::format("{}:{}: {}", path_, at.Mark().line + 1, what));
  }

  std::string path_;
  std::set<std::string> names_;
};

// yaml-cpp would replace other bytes, and takes a null character for the begin of an escape.
bool is_possible(const std::string& text) {
  return base::is_utf8(text) && text.find('\0') == std::string::npos;
}

// What the parser does not say of a line that it refuses.
std::string hint_for(const std::string& text, int line) {
  std::istringstream lines(text);
  std::string refused;
  for (int i = 0; i <= line; ++i) std::getline(lines, refused);
  const bool has_tab = refused.find('\t') < refused.find_first_not_of(" \t");
  return has_tab ? "; the line is indented with a tab: use spaces" : "";
}

// Load reads the first document of a text and ignores the others. LoadAll never returns from some
// texts that are no YAML.
class OneDocument final : public YAML::EventHandler {
 public:
  explicit OneDocument(const std::string& source) : source_(source) {}

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ == 1) return;
    throw UsageError(
        fmt::format("{}:{}: begins a second document: write all options into the first one",
                    source_, mark.line + 1));
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  const std::string& source_;
  int documents_ = 0;
};

YAML::Node load_yaml(const std::string& text, const std::string& source) {
  if (!is_possible(text)) {
    throw UsageError(
        fmt::format("{}: is not UTF-8 text: save it as UTF-8, without null characters", source));
  }
  try {
    std::istringstream stream(text);
    YAML::Parser parser(stream);
    OneDocument document(source);
    while (parser.HandleNextDocument(document)) {
    }
    return YAML::Load(text);
  } catch (const YAML::Exception& error) {
    const std::string line = error.mark.is_null() ? "" : fmt::format(":{}", error.mark.line + 1);
    throw UsageError(fmt::format("{}{}: is no YAML: {}{}", source, line, error.msg,
                                 hint_for(text, error.mark.line)));
  }
}

// NOLINTNEXTLINE(misc-no-recursion): as deep as the names
void emit(YAML::Emitter& emitter, const YAML::Node& node) {
  if (node.IsScalar()) {
    // Left to itself, yaml-cpp writes texts with carriage returns that it reads differently.
    const bool is_plain = std::ranges::none_of(
        node.Scalar(), [](char character) { return character >= '\0' && character < ' '; });
    emitter << (is_plain ? YAML::Auto : YAML::DoubleQuoted) << node.Scalar();
  } else if (node.IsSequence()) {
    emitter << YAML::Flow << YAML::BeginSeq;
    for (const auto& one : node) emit(emitter, one);
    emitter << YAML::EndSeq;
  } else {
    emitter << YAML::BeginMap;
    for (const auto& one : node) {
      emitter << YAML::Key << one.first.Scalar() << YAML::Value;
      emit(emitter, one.second);
    }
    emitter << YAML::EndMap;
  }
}

}  // namespace

std::vector<ConfigValue> parse_yaml(const std::string& content, const std::string& path) {
  const YAML::Node top = load_yaml(content, path);
  if (top.IsNull()) return {};
  if (!top.IsMap()) throw UsageError(fmt::format("{}: has no map of names to values", path));
  YamlReader reader(path);
  reader.read(top, "");
  return std::move(reader.values);
}

std::vector<std::string> parse_yaml_list(const std::string& text, const std::string& source) {
  const YAML::Node list = load_yaml(text, source);
  std::vector<std::string> texts;
  for (const auto& one : list) {
    if (!list.IsSequence() || !one.IsScalar()) {
      throw UsageError(fmt::format("{} {}: is no list of texts", source, text));
    }
    texts.push_back(one.Scalar());
  }
  return texts;
}

std::string write_yaml(const std::vector<ConfigValue>& values) {
  YAML::Node top(YAML::NodeType::Map);
  for (const ConfigValue& value : values) {
    if (!std::ranges::all_of(value.texts, is_possible)) {
      throw UsageError(fmt::format(
          "{} cannot be saved: it is not UTF-8 text without null characters", value.name));
    }
    YAML::Node at = top;
    std::size_t begin = 0;
    for (std::size_t dot = 0; (dot = value.name.find('.', begin)) != std::string::npos;) {
      at.reset(at[value.name.substr(begin, dot - begin)]);
      begin = dot + 1;
    }
    at[value.name.substr(begin)] =
        value.is_list ? YAML::Node(value.texts) : YAML::Node(value.texts.at(0));
  }
  YAML::Emitter emitter;
  emit(emitter, top);
  return emitter.c_str() + std::string("\n");
}

}  // namespace paceline::train

#else

namespace paceline::train {
namespace {

[[noreturn]] void throw_no_yaml() {
  throw UsageError(
      "Paceline was built without yaml-cpp, which Config needs: on Debian, apt-get install "
      "libyaml-cpp-dev, and build it again");
}

}  // namespace

std::vector<ConfigValue> parse_yaml(const std::string& /*content*/, const std::string& /*path*/) {
  throw_no_yaml();
}

std::vector<std::string> parse_yaml_list(const std::string& /*text*/,
                                         const std::string& /*source*/) {
  throw_no_yaml();
}

std::string write_yaml(const std::vector<ConfigValue>& /*values*/) {
  throw_no_yaml();
}

}  // namespace paceline::train

#endif
