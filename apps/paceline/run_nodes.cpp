#include "run_nodes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <initializer_list>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/version.h>

#include "base/address.h"
#include "base/parse.h"
#include "base/unique_fd.h"
#include "launch/clip.h"
#include "parse_seconds.h"

namespace paceline::app {
namespace {

constexpr int kStaticPort = 29500;
constexpr int kDynamicPort = 29400;
constexpr int kMaxNodes = 4096;
constexpr std::size_t kMinSecret = 16;
constexpr std::size_t kMaxSecret = 4096;

std::pair<int, int> parse_nnodes(const std::string& text) {
  const std::size_t colon = text.find(':');
  const auto min = base::parse_number(text.substr(0, colon), 1, kMaxNodes);
  const auto max =
      colon == text.npos ? min : base::parse_number(text.substr(colon + 1), 1, kMaxNodes);
  if (min && max && *min <= *max) return {*min, *max};
  throw UsageError(fmt::format(
      "--nnodes {}: expected a number from 1 to {}, or MIN:MAX, such as 2:4", text, kMaxNodes));
}

// HOST, HOST:PORT, [IPV6] or [IPV6]:PORT. On one machine, as torchrun has it, 0 is a free port.
std::pair<std::string, int> parse_endpoint(const std::string& text, int default_port,
                                           bool several_machines) {
  const std::size_t bracket = text.starts_with('[') ? text.find(']') : text.npos;
  const std::size_t colon = text.find(':', bracket == text.npos ? 0 : bracket);
  std::string host = bracket == text.npos ? text.substr(0, colon) : text.substr(1, bracket - 1);
  const auto port = colon == text.npos ? std::optional(default_port)
                                       : base::parse_number(text.substr(colon + 1),
                                                            several_machines ? 1 : 0, 65535);
  const bool ends_host = bracket == text.npos || bracket + 1 == std::min(colon, text.size());
  if (!host.empty() && port && ends_host) return {std::move(host), *port};
  throw UsageError(fmt::format(
      "--rdzv-endpoint {}: expected HOST or HOST:PORT, such as 10.0.0.1:{} or [fd00::1]:{}", text,
      default_port, default_port));
}

// As torchrun reads it.
bool parse_yes(const std::string& flag, std::string_view value) {
  std::string text(value);
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto is_one_of = [&](std::initializer_list<std::string_view> words) {
    return std::ranges::find(words, text) != words.end();
  };
  if (is_one_of({"1", "true", "t", "yes", "y"})) return true;
  if (is_one_of({"0", "false", "f", "no", "n"})) return false;
  throw UsageError(fmt::format("{} {}: expected 0 or 1", flag, value));
}

// Applies torchrun's keys that mean something here, and returns the others.
std::vector<std::string> apply_conf(const RunFlags& flags, nodes::SessionOptions& options) {
  std::vector<std::string> without_effect;
  const std::string& text = flags.rdzv_conf;
  if (text.empty()) return without_effect;
  for (const std::string_view entry : base::split_at_commas(text)) {
    const std::size_t equals = entry.find('=');
    if (equals == entry.npos || equals == 0) {
      throw UsageError(fmt::format("--rdzv-conf {}: '{}' is not KEY=VALUE", text, entry));
    }
    const std::string_view key = entry.substr(0, equals);
    const std::string_view value = entry.substr(equals + 1);
    const std::string flag = fmt::format("--rdzv-conf {}:", key);
    bool has_effect = true;
    if (key == "join_timeout" || key == "timeout") {
      options.rules.join_timeout = parse_seconds(flag, value);
    } else if (key == "last_call_timeout") {
      options.rules.last_call = parse_seconds(flag, value);
      has_effect = options.rules.min_nodes < options.rules.max_nodes;
    } else if (key == "is_host") {
      const bool is_host = parse_yes(flag, value);
      has_effect = !options.rules.numbered;
      if (has_effect) options.coordinates = is_host;
    } else {
      has_effect = false;
    }
    if (!has_effect) without_effect.push_back(fmt::format("{} of --rdzv-conf", key));
  }
  return without_effect;
}

void add_given(const RunFlags& flags, std::initializer_list<const char*> names,
               std::vector<std::string>& all) {
  for (const char* const name : names) {
    if (const std::string given = flags.given(name); !given.empty()) all.push_back(given);
  }
}

// Also of a pipe, such as a shell makes of <(command).
std::string read_secret_file(const std::string& path, const std::string& source) {
  const base::UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string secret(kMaxSecret + 1, '\0');
  std::size_t size = 0;
  ssize_t got = file ? 1 : -1;
  while (got > 0 && size < secret.size()) {
    got = ::read(file.get(), secret.data() + size, secret.size() - size);
    if (got > 0) size += static_cast<std::size_t>(got);
  }
  if (got < 0) {
    throw UsageError(
        fmt::format("{}: cannot read it: {}", source, std::generic_category().message(errno)));
  }
  if (size > kMaxSecret) {
    throw UsageError(fmt::format("{}: a secret must have at most {} bytes", source, kMaxSecret));
  }
  secret.resize(size);
  return secret;
}

std::string read_secret(const RunFlags& flags) {
  std::string secret;
  std::string source = "PACELINE_SECRET";
  if (!flags.secret_file.empty()) {
    source = fmt::format("--secret-file {}", flags.secret_file);
    secret = read_secret_file(flags.secret_file, source);
  } else if (const char* const value = std::getenv("PACELINE_SECRET"); value != nullptr) {
    secret = value;
  }
  // An editor or `echo` ends the file's last line.
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  if (secret.size() >= kMinSecret || (secret.empty() && flags.secret_file.empty())) return secret;
  throw UsageError(
      fmt::format("{}: the secret has {} bytes; expected at least {}, such as `head -c 16 "
                  "/dev/urandom | base64` prints",
                  source, secret.size(), kMinSecret));
}

// All of them have to fit into a message, and what ended by request says nothing new.
std::vector<launch::RankResult> shorten(std::vector<launch::RankResult> ranks) {
  constexpr std::size_t kMaxText = 4096;  // of an error
  constexpr std::size_t kMaxBlamed = 64;
  std::size_t left = std::size_t{1} << 20;
  for (launch::RankResult& rank : ranks) {
    std::size_t size = 0;
    for (const std::string& line : rank.last_lines) size += line.size();
    if (rank.stopped || size > left) rank.last_lines.clear();
    left -= rank.last_lines.empty() ? 0 : size;
    if (!rank.error) continue;
    rank.error->message = launch::clip(rank.error->message, std::min(left, kMaxText));
    rank.error->blamed_ranks.resize(std::min(rank.error->blamed_ranks.size(), kMaxBlamed));
    left -= std::min(left, rank.error->message.size());
  }
  return ranks;
}

void apply(const nodes::Start& start, launch::JobSpec& spec) {
  spec.nodes = start.nodes;
  spec.node = start.node;
  spec.first_rank = start.first_rank;
  spec.world_size = start.world_size;
  spec.first_role_rank = start.first_role_rank;
  spec.role_world_size = start.role_world_size;
  spec.restart = start.restart;
  spec.max_restarts = start.max_restarts;
  spec.tolerate_loss = start.tolerate_loss;
  spec.run_id = start.job;
  spec.master_addr = start.master_addr;
  spec.master_port = start.master_port;
}

}  // namespace

std::optional<nodes::SessionOptions> make_session_options(
    const RunFlags& flags, const launch::JobSpec& job, std::vector<std::string>& without_effect) {
  const auto [min, max] = parse_nnodes(flags.nnodes);
  const bool is_static = flags.rdzv_backend == kStaticBackend;
  if (!is_static && flags.rdzv_backend != "c10d") {
    throw UsageError(fmt::format("--rdzv-backend {}: expected static or c10d", flags.rdzv_backend));
  }
  const int node =
      base::parse_integer("--node-rank", flags.node_rank, 0, is_static ? max - 1 : kMaxNodes);
  nodes::SessionOptions options;
  options.rules.min_nodes = min;
  options.rules.max_nodes = max;
  options.rules.numbered = is_static;
  options.host = job.master_addr;
  options.port = flags.master_port ? job.master_port : kStaticPort;
  const bool has_endpoint = !flags.rdzv_endpoint.empty() && (max > 1 || !flags.standalone);
  if (has_endpoint) {
    std::tie(options.host, options.port) =
        parse_endpoint(flags.rdzv_endpoint, is_static ? kStaticPort : kDynamicPort, max > 1);
  }
  const auto keys = apply_conf(flags, options);
  if (max == 1) {
    add_given(flags,
              {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--local-addr", "--secret-file"},
              without_effect);
    if (!is_static) add_given(flags, {"--node-rank"}, without_effect);
    return std::nullopt;
  }
  if (job.max_replacements > 0) {
    throw UsageError(
        fmt::format("--max-replacements {}: processes are replaced on one node, and --nnodes {} "
                    "means several; --max-restarts starts all of them again",
                    job.max_replacements, flags.nnodes));
  }
  if (flags.standalone) {
    throw UsageError(
        fmt::format("--standalone means one machine, and --nnodes {} several", flags.nnodes));
  }
  if (is_static && min != max) {
    throw UsageError(
        fmt::format("--nnodes {}: a number of machines that may vary needs "
                    "--rdzv-backend c10d and --rdzv-endpoint",
                    flags.nnodes));
  }
  if (!is_static && !has_endpoint) {
    throw UsageError(
        "--rdzv-backend c10d needs --rdzv-endpoint HOST:PORT, the same on all machines");
  }
  without_effect.insert(without_effect.end(), keys.begin(), keys.end());
  if (!is_static) add_given(flags, {"--node-rank"}, without_effect);
  if (has_endpoint) add_given(flags, {"--master-addr", "--master-port"}, without_effect);
  options.rules.job = flags.run_id.empty() ? kUnnamedJob : flags.run_id;
  options.rules.max_restarts = job.max_restarts;
  options.rules.tolerate_loss = job.tolerate_loss;
  options.rules.master_addr = flags.local_addr;
  options.join = {.version = kVersion,
                  .job = options.rules.job,
                  .host = base::host_name(),
                  .processes = job.processes,
                  .min_nodes = min,
                  .max_nodes = max,
                  .tolerate_loss = job.tolerate_loss,
                  .role = job.role};
  if (!flags.given("--max-restarts").empty()) options.join.max_restarts = job.max_restarts;
  if (is_static) options.join.node = node;
  if (is_static) options.coordinates = node == 0;
  const std::string secret = read_secret(flags);
  options.has_secret = !secret.empty();
  options.key = net::make_key(secret);
  return options;
}

nodes::Verdict run_on_nodes(const nodes::SessionOptions& options, launch::JobSpec& spec,
                            const std::function<launch::JobResult()>& run,
                            const std::function<void(const std::string&)>& print) {
  nodes::NodeSession session(options, spec.signals, spec.writers, print);
  spec.other_nodes = &session;
  while (const auto start = session.await_start()) {
    apply(*start, spec);
    nodes::Result result;
    try {
      result.ranks = shorten(run().ranks);
    } catch (const std::exception& error) {
      result.problem = fmt::format("its launcher failed: {}", error.what());
    }
    nodes::Verdict verdict = session.await_verdict(result);
    print(verdict.report);
    if (!verdict.restarts) return verdict;
  }
  print(session.verdict().report);
  return session.verdict();
}

}  // namespace paceline::app
