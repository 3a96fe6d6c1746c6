#include <paceline/config.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <system_error>

#include <paceline/distributed.h>
#include <paceline/error.h>

#include "base/nearest_name.h"
#include "base/parse.h"
#include "checkpoint/file_writer.h"
#include "train/yaml_file.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using train::ConfigValue;

template <typename T>
bool parse_whole(const std::string& text, T& value) {
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && rest == end;
}

bool is_integer(const std::string& text) {
  const std::size_t sign = text.starts_with('-') ? 1 : 0;
  return text.size() > sign && text.find_first_not_of("0123456789", sign) == std::string::npos;
}

}  // namespace

namespace detail {

bool parse_option(const std::string& text, bool& value) {
  value = text == "true";
  return value || text == "false";
}
bool parse_option(const std::string& text, std::int64_t& value) {
  return parse_whole(text, value);
}
bool parse_option(const std::string& text, std::uint64_t& value) {
  return parse_whole(text, value);
}
bool parse_option(const std::string& text, double& value) {
  const bool has_sign = text.starts_with('+') || text.starts_with('-');
  const std::string number = has_sign ? text.substr(1) : text;
  if (number == ".nan" || number == ".NaN" || number == ".NAN") {  // YAML's
    value = std::numeric_limits<double>::quiet_NaN();
    return !has_sign;
  }
  if (number == ".inf" || number == ".Inf" || number == ".INF") {
    value = std::numeric_limits<double>::infinity();
  } else if (number.starts_with('-') || number.ends_with(')') || !parse_whole(number, value)) {
    return false;  // nan(text) is a number, too, for the standard library
  }
  if (text.starts_with('-')) value = -value;
  return true;
}
std::string format_option(bool value) {
  return value ? "true" : "false";
}
std::string format_option(double value) {
  if (value == std::numeric_limits<double>::infinity()) return ".inf";
  return value == -std::numeric_limits<double>::infinity() ? "-.inf" : fmt::format("{}", value);
}

}  // namespace detail

void Config::add_option(const std::string& name, detail::ConfigOption option) {
  for (const auto& one : options_) {
    const std::string& other = one.first;
    if (name == other || name.starts_with(other + ".") || other.starts_with(name + ".")) {
      throw UsageError(fmt::format("Config::add: the name '{}' is in use, by '{}'", name, other));
    }
  }
  if (name.empty() || name == "config" || name == "help" || name == "print-config") {
    throw UsageError(fmt::format("Config::add: the name '{}' cannot be used", name));
  }
  options_.emplace_back(name, std::move(option));
}

const detail::ConfigOption& Config::find(const std::string& name, const std::string& source) const {
  std::vector<std::string> names;
  for (const auto& [other, option] : options_) {
    if (other == name) return option;
    names.push_back(other);
  }
  const std::string nearest = base::nearest_name(name, names);
  throw UsageError(fmt::format("{}: unknown option '{}'; {}", source, name,
                               !nearest.empty() ? fmt::format("did you mean '{}'?", nearest)
                               : names.empty()
                                   ? "there are none"
                                   : fmt::format("there are {}", fmt::join(names, ", "))));
}

void Config::set(const std::string& name, const std::vector<std::string>& texts,
                 const std::string& source) const {
  const detail::ConfigOption& option = find(name, source);
  if (!option.set(texts)) {
    const bool are_integers = !option.is_bool && std::ranges::all_of(texts, is_integer);
    throw UsageError(fmt::format("{}: {} is '{}'; it must be {}{}", source, name,
                                 fmt::join(texts, ", "), option.type,
                                 are_integers ? ", in the range of its type" : ""));
  }
}

void Config::load(const fs::path& path) {
  // Not base::read_file: --config <(...) is a pipe.
  errno = 0;
  std::ifstream file(path);
  std::ostringstream content;
  std::error_code ignored;
  const bool is_directory = fs::is_directory(path, ignored);
  if (!file || is_directory || (file.peek() != EOF && !(content << file.rdbuf()))) {
    throw Error(fmt::format("cannot read {}: {}", path.string(),
                            is_directory ? "it is a directory" : std::strerror(errno)));
  }
  for (const ConfigValue& value : train::parse_yaml(content.str(), path.string())) {
    const std::string source = fmt::format("{}:{}", path.string(), value.line);
    const detail::ConfigOption& option = find(value.name, source);
    if (option.is_list != value.is_list) {
      throw UsageError(fmt::format("{}: {} must be {}", source, value.name, option.type));
    }
    set(value.name, value.texts, source);
  }
}

namespace {

// "--name value", "--name=value", "--name".
struct Flag {
  std::string name;
  std::optional<std::string> value;
};

Flag parse_flag(const std::string& argument) {
  if (!argument.starts_with("--") || argument.size() == 2) {
    throw UsageError(fmt::format(
        "unexpected argument '{}'; options begin with --, and one that is true or false takes a "
        "value only after '=' (--name=true)",
        argument));
  }
  const std::size_t equals = argument.find('=');
  if (equals == std::string::npos) return {argument.substr(2), std::nullopt};
  return {argument.substr(2, equals - 2), argument.substr(equals + 1)};
}

// "[a, b]" as in a file, or "a,b".
std::vector<std::string> list_of(const std::string& text, const std::string& source) {
  if (text.starts_with('[')) return train::parse_yaml_list(text, source);
  if (text.empty()) return {};
  const auto parts = base::split_at_commas(text);
  return {parts.begin(), parts.end()};
}

}  // namespace

// As torchrun's, flags may have dashes where names have underscores.
std::string Config::name_of_flag(const std::string& flag) const {
  std::string found = flag;
  for (const auto& [name, option] : options_) {
    if (name == flag) return name;
    const bool is_similar = std::ranges::equal(name, flag, [](char of_name, char of_flag) {
      return of_name == of_flag || (of_name == '_' && of_flag == '-');
    });
    if (is_similar) found = name;
  }
  return found;
}

std::optional<std::string> Config::parse(int argc, const char* const* argv) {
  std::vector<std::pair<std::string, std::vector<std::string>>> flags;  // set after the files
  bool prints = false;
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == std::string_view("-h") || argv[i] == std::string_view("--help")) return help();
    auto [flag, value] = parse_flag(argv[i]);
    const std::string source = "--" + flag;
    const std::string name = name_of_flag(flag);
    const std::string negated = name.starts_with("no-") ? name_of_flag(name.substr(3)) : "";
    const bool negates = std::ranges::any_of(options_, [&](const auto& option) {
      return option.second.is_bool && option.first == negated;
    });
    if (value && (negates || name == "help" || name == "print-config")) {
      throw UsageError(fmt::format("{}: it takes no value, and got '{}'", source, *value));
    }
    if (name == "print-config") {
      prints = true;
      continue;
    }
    if (negates) {
      flags.emplace_back(negated, std::vector<std::string>{"false"});
      continue;
    }
    const bool is_list = name != "config" && find(name, source).is_list;
    if (!value && name != "config" && find(name, source).is_bool) value = "true";
    if (!value && i + 1 < argc) value = argv[++i];
    if (!value) throw UsageError(fmt::format("{}: a value must follow", source));
    if (name == "config") {
      load(*value);
    } else {
      flags.emplace_back(name, is_list ? list_of(*value, source) : std::vector{*value});
    }
  }
  for (const auto& [name, texts] : flags) set(name, texts, "--" + name);
  return prints ? std::optional(to_yaml()) : std::nullopt;
}

std::string Config::help() const {
  std::string text = description_.empty() ? "" : description_ + "\n\n";
  text += "  --config FILE\n      A YAML file with options\n";
  text += "  --print-config\n      Print all options with their values, as such a file\n";
  for (const auto& [name, option] : options_) {
    text += fmt::format("  --{}\n      {}{}{} (default: {})\n", name, option.help,
                        option.help.empty() ? "" : "; ", option.type, fmt::join(option.get(), ","));
  }
  text.pop_back();
  return text;
}

std::string Config::to_yaml() const {
  std::vector<ConfigValue> values;
  for (const auto& [name, option] : options_) {
    values.push_back({name, option.get(), option.is_list, 0});
  }
  return train::write_yaml(values);
}

void Config::save(const fs::path& path) const {
  if (get_rank() != 0) return;
  std::error_code error;
  if (path.has_parent_path()) fs::create_directories(path.parent_path(), error);
  if (error) {
    throw Error(fmt::format("cannot make the directory of {}: {}", path.string(), error.message()));
  }
  checkpoint::FileWriter file(path, {});
  file.write(to_yaml());
  file.commit();
}

}  // namespace paceline
