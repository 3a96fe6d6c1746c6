#include "run_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>

#include <paceline/error.h>

#include "base/nearest_name.h"
#include "completion.h"
#include "describe_run_flags.h"

namespace paceline::app {
namespace {

// As errors name a flag.
std::string name_of(const CLI::Option& option) {
  return "--" + option.get_lnames().front();
}

bool takes_value(const CLI::Option& option) {
  return option.get_items_expected_max() > 0;
}

// A flag as it was written: --name, --name=value, -n, -n=value or -nvalue.
struct WrittenFlag {
  std::string name;  // as CLI11 knows it: with dashes, not underscores
  std::optional<std::string> value;
};

WrittenFlag parse_flag(const std::string& text) {
  const bool is_long = text.starts_with("--");
  const std::size_t end = std::min(is_long ? text.find('=') : 2, text.size());
  WrittenFlag flag{text.substr(0, end), {}};
  std::replace(flag.name.begin(), flag.name.end(), '_', '-');
  if (end < text.size()) flag.value = text.substr(end + (text[end] == '=' ? 1 : 0));
  return flag;
}

// Throws the error for a flag that there is not: an abbreviation, as torchrun takes it, mpirun's,
// or a misspelled one.
[[noreturn]] void refuse_unknown(const CLI::App& app, const std::string& text,
                                 const std::string& name) {
  std::vector<std::string> names;
  for (const CLI::Option* const option : app.get_options()) {
    std::ranges::copy(option->get_lnames(), std::back_inserter(names));
  }
  std::vector<std::string> meant;
  if (name == "-n") meant.emplace_back("nproc-per-node");
  if (name.size() > 2) {
    const std::string wrong = name.substr(2);
    std::ranges::copy_if(names, std::back_inserter(meant),
                         [&](const std::string& one) { return one.starts_with(wrong); });
    const std::string nearest = base::nearest_name(wrong, names);
    if (meant.empty() && !nearest.empty()) meant.push_back(nearest);
  }
  constexpr std::size_t kMost = 3;
  throw UsageError(
      meant.empty() || meant.size() > kMost
          ? fmt::format("unknown flag {}", text)
          : fmt::format("unknown flag {}; did you mean --{}?", text, fmt::join(meant, " or --")));
}

// Separates our flags from the program and its arguments.
struct SplitArguments {
  std::vector<std::string> flags;              // each value by itself
  std::map<std::string, std::string> written;  // see RunFlags
  std::vector<std::string> command;
};

SplitArguments split(const CLI::App& app, const std::vector<std::string>& arguments) {
  SplitArguments result;
  auto at = arguments.begin();
  while (at != arguments.end() && at->size() > 1 && at->front() == '-' && *at != "--") {
    const std::string& text = *at++;
    WrittenFlag flag = parse_flag(text);
    const CLI::Option* const option = app.get_option_no_throw(flag.name);
    if (option == nullptr) refuse_unknown(app, text, flag.name);
    result.written[name_of(*option)] = flag.name;
    result.flags.push_back(flag.name);
    if (!takes_value(*option)) {
      if (flag.value) throw UsageError(fmt::format("{}: this flag takes no value", text));
      continue;
    }
    if (!flag.value && at == arguments.end()) {
      throw UsageError(fmt::format("{}: expected a value", text));
    }
    result.flags.push_back(flag.value ? *flag.value : *at++);
  }
  if (at != arguments.end() && *at == "--") ++at;
  result.command.assign(at, arguments.end());
  return result;
}

// "PET_NNODES" for "nnodes".
std::string torchruns_variable(const std::string& name) {
  std::string variable = "PET_" + name;
  for (char& letter : variable) {
    letter =
        letter == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  }
  return variable;
}

// Adds what torchrun's variables set and the command line does not.
void add_variables(const CLI::App& app, SplitArguments& parts, RunFlags& flags) {
  for (const CLI::Option* const option : app.get_options()) {
    if (option == app.get_help_ptr() || option->check_name("--print-completion")) continue;
    const std::string flag = name_of(*option);
    if (parts.written.contains(flag)) continue;
    std::vector<std::string> variables;
    for (const std::string& name : option->get_lnames()) {
      variables.push_back(torchruns_variable(name));
    }
    if (option->check_lname("shutdown-timeout")) {
      variables.emplace_back("TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
    }
    for (const std::string& variable : variables) {
      const char* const value = std::getenv(variable.c_str());
      if (value == nullptr || *value == '\0') continue;
      flags.variables[flag] = variable;
      if (takes_value(*option)) {
        parts.flags.insert(parts.flags.end(), {flag, value});
      } else if (const std::string text = value; text == "1") {
        parts.flags.push_back(flag);
      } else if (text != "0") {
        throw UsageError(fmt::format("{}={}: expected 0 or 1", variable, value));
      }
      break;
    }
  }
}

}  // namespace

std::string RunFlags::given(const std::string& flag) const {
  if (const auto found = written.find(flag); found != written.end()) return found->second;
  const auto found = variables.find(flag);
  return found == variables.end() ? "" : found->second;
}

std::optional<std::vector<std::string>> parse_run_flags(const std::vector<std::string>& arguments,
                                                        RunFlags& flags, std::string& help) {
  CLI::App app("Starts a program as several processes, on this machine or on several.");
  describe_run_flags(app, flags);
  SplitArguments parts = split(app, arguments);
  add_variables(app, parts, flags);
  flags.written = std::move(parts.written);
  std::reverse(parts.flags.begin(), parts.flags.end());  // as CLI11 wants them
  try {
    app.parse(parts.flags);
  } catch (const CLI::CallForHelp&) {
    help = app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (flags.completion_shell) {
    help = completion_script(app, *flags.completion_shell);
    return std::nullopt;
  }
  return std::move(parts.command);
}

}  // namespace paceline::app
