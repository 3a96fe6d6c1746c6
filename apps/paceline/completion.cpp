#include "completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <vector>

#include <paceline/error.h>

namespace paceline::app {
namespace {

// Where the flags end, the program begins: from there on, files are completed. "=" is a word of its
// own in bash.
constexpr std::string_view kBash = R"(_paceline() {{
  COMPREPLY=()
  local word=${{COMP_WORDS[COMP_CWORD]}} i
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W 'run report top bench doctor' -- "$word"))
    return
  fi
  [[ ${{COMP_WORDS[1]}} == run && $word == -* ]] || return
  for ((i = 2; i < COMP_CWORD; ++i)); do
    case ${{COMP_WORDS[i]//_/-}} in
      {values}) [[ ${{COMP_WORDS[++i]}} == = ]] && ((++i)) ;;
      --) return ;;
      -*) ;;
      *) return ;;
    esac
  done
  ((i == COMP_CWORD)) && COMPREPLY=($(compgen -W '{all}' -- "${{word//_/-}}"))
}}
complete -o default -F _paceline paceline
)";

// To be sourced, or a file _paceline in $fpath.
constexpr std::string_view kZsh = R"(#compdef paceline
_paceline() {{
  local i
  if ((CURRENT == 2)); then
    compadd run report top bench doctor
    return
  fi
  if [[ $words[2] == run && $words[CURRENT] == -* ]]; then
    for ((i = 3; i < CURRENT; ++i)); do
      case ${{words[i]//_/-}} in
        ({values}) ((++i)) ;;
        (--) break ;;
        (-*) ;;
        (*) break ;;
      esac
    done
    if ((i == CURRENT)); then
      compadd -- {all}
      return
    fi
  fi
  _files
}}
if [[ $funcstack[1] == _paceline ]]; then
  _paceline "$@"
else
  compdef _paceline paceline
fi
)";

// tcsh cannot tell where the program begins.
constexpr std::string_view kTcsh =
    "complete paceline 'p/1/(run report top bench doctor)/' 'C/--/({all})/' 'n/*/f/'\n";

}  // namespace

std::string completion_script(const CLI::App& run, const std::string& shell) {
  std::vector<std::string> all;
  std::vector<std::string> values;  // those that the next word belongs to, with their short names
  for (const CLI::Option* const option : run.get_options()) {
    for (const std::string& name : option->get_lnames()) all.push_back("--" + name);
    if (option->get_items_expected_max() == 0) continue;
    for (const std::string& name : option->get_lnames()) values.push_back("--" + name);
    for (const std::string& name : option->get_snames()) values.push_back("-" + name);
  }
  const std::string_view script = shell == "bash"   ? kBash
                                  : shell == "zsh"  ? kZsh
                                  : shell == "tcsh" ? kTcsh
                                                    : std::string_view();
  if (script.empty()) {
    throw UsageError(fmt::format("--print-completion {}: expected bash, zsh or tcsh", shell));
  }
  return fmt::format(fmt::runtime(script), fmt::arg("all", fmt::join(all, " ")),
                     fmt::arg("values", fmt::join(values, "|")));
}

}  // namespace paceline::app
