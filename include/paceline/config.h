#pragma once

/// @file
/// Options of a program, from a YAML file and from the command line.

#include <cmath>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/api.h>

namespace paceline {

namespace detail {

// Each sets `value` and returns true, or returns false if the text is none of its type.
PACELINE_API bool parse_option(const std::string& text, bool& value);
PACELINE_API bool parse_option(const std::string& text, std::int64_t& value);
PACELINE_API bool parse_option(const std::string& text, std::uint64_t& value);
PACELINE_API bool parse_option(const std::string& text, double& value);
// Text that parse_option takes back.
PACELINE_API std::string format_option(bool value);
PACELINE_API std::string format_option(double value);

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

template <typename T>
concept ScalarOption = std::is_arithmetic_v<T> || std::same_as<T, std::string> ||
    std::same_as<T, std::filesystem::path>;

// What stands for T in parse_option.
template <typename T>
using Parsed = std::conditional_t<
    std::same_as<T, bool>, bool,
    std::conditional_t<std::floating_point<T>, double,
                       std::conditional_t<std::unsigned_integral<T>, std::uint64_t, std::int64_t>>>;

template <ScalarOption T>
bool set_scalar(const std::string& text, T& variable) {
  if constexpr (!std::is_arithmetic_v<T>) {
    variable = text;
    return true;
  } else {
    Parsed<T> value{};
    if (!parse_option(text, value)) return false;
    if constexpr (std::integral<T> && !std::same_as<T, bool>) {
      if (!std::in_range<T>(value)) return false;
    }
    if constexpr (std::floating_point<T>) {
      if (std::isfinite(value) != std::isfinite(static_cast<T>(value))) return false;
    }
    variable = static_cast<T>(value);
    return true;
  }
}

template <ScalarOption T>
std::string get_scalar(const T& variable) {
  if constexpr (std::integral<T> && !std::same_as<T, bool>) {
    return std::to_string(variable);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return format_option(static_cast<Parsed<T>>(variable));
  } else {
    return std::string(variable);
  }
}

template <ScalarOption T>
const char* name_of_type() {
  if constexpr (std::same_as<T, bool>) return "true or false";
  if constexpr (std::floating_point<T>) return "a number";
  if constexpr (std::unsigned_integral<T>) return "an integer that is not negative";
  if constexpr (std::integral<T>) return "an integer";
  return "a text";
}

// A variable of the program.
struct ConfigOption {
  std::string help;
  std::string type;
  bool is_list;
  bool is_bool;
  // Sets the variable from one text, or from the texts of a list. Returns whether they have its
  // type.
  std::function<bool(const std::vector<std::string>&)> set;
  std::function<std::vector<std::string>()> get;
};

template <ScalarOption T>
ConfigOption make_option(T& variable, std::string help) {
  return {std::move(help),
          name_of_type<T>(),
          false,
          std::same_as<T, bool>,
          [&variable](const std::vector<std::string>& texts) {
            return texts.size() == 1 && set_scalar(texts[0], variable);
          },
          [&variable] { return std::vector{get_scalar(variable)}; }};
}
template <ScalarOption T>
ConfigOption make_option(std::vector<T>& variable, std::string help) {
  return {std::move(help),
          std::string("a list, each of which is ") + name_of_type<T>(),
          true,
          false,
          [&variable](const std::vector<std::string>& texts) {
            std::vector<T> values;
            for (const std::string& text : texts) {
              T value{};
              if (!set_scalar(text, value)) return false;
              values.push_back(std::move(value));
            }
            variable = std::move(values);
            return true;
          },
          [&variable] {
            std::vector<std::string> texts;
            for (const T& value : variable) texts.push_back(get_scalar(value));
            return texts;
          }};
}

}  // namespace detail

/// The options of a program: variables, set by a YAML file and by flags.
///
///     struct { int epochs = 5; double lr = 0.1; std::vector<int> milestones{30, 60}; } options;
///     paceline::Config config("Trains a net.");
///     config.add("epochs", options.epochs, "how often the data are seen");
///     config.add("optimizer.lr", options.lr);
///     config.add("milestones", options.milestones);
///     if (const auto text = config.parse(argc, argv)) return paceline::print(*text), 0;
///     config.save("runs/1/config.yaml");
///
/// with
///
///     epochs: 10                    # in train.yaml
///     optimizer:
///       lr: 0.2
///
///     train --config train.yaml --epochs=20 --optimizer.lr 0.3 --milestones 40,80
///
/// A dot in a name separates the maps of the file. What is set nowhere keeps its value. Flags
/// override the file, in any order; `--config` may come several times, and then later files
/// override earlier ones. A bool is set by `--name` or `--no-name`, or by `--name=false`. Flags may
/// have dashes where names have underscores.
///
/// Errors are UsageError and name the file and the line, or the flag, what was got and what is
/// allowed, and for an unknown name the nearest one. Needs yaml-cpp when Paceline is built.
class PACELINE_API Config {
 public:
  /// `description`: of the program, for `--help`.
  explicit Config(std::string description = "") : description_(std::move(description)) {}

  /// Declares an option: a bool, a number, a string, a path, or a vector of these. `variable` must
  /// outlive the Config and has the default. Throws UsageError if the name is empty, in use, or
  /// the beginning of another up to a dot, or if it is "config", "help" or "print-config".
  template <typename T>
  void add(const std::string& name, T& variable, std::string help = "") {
    static_assert(detail::ScalarOption<T> || detail::IsVector<T>::value,
                  "an option is a bool, a number, a std::string, a std::filesystem::path, or a "
                  "std::vector of these");
    add_option(name, detail::make_option(variable, std::move(help)));
  }

  /// Sets the variables from the arguments of main. For `--help` and `--print-config`, returns a
  /// text that the program should print before it ends. Throws UsageError as the class says, and
  /// Error if a file cannot be read; variables may be set in part then.
  [[nodiscard]] std::optional<std::string> parse(int argc, const char* const* argv);
  /// Sets the variables that a file has. Throws as parse does.
  void load(const std::filesystem::path& path);

  /// All options with their present values, as a file that load reads.
  std::string to_yaml() const;
  /// Writes to_yaml() to a file on rank 0, and makes its directory if needed. Throws Error if that
  /// fails.
  void save(const std::filesystem::path& path) const;

 private:
  void add_option(const std::string& name, detail::ConfigOption option);
  std::string name_of_flag(const std::string& flag) const;
  const detail::ConfigOption& find(const std::string& name, const std::string& source) const;
  void set(const std::string& name, const std::vector<std::string>& texts,
           const std::string& source) const;
  std::string help() const;

  std::string description_;
  std::vector<std::pair<std::string, detail::ConfigOption>> options_;  // in the order of add
};

}  // namespace paceline
