// The debug servers of ranks, asked over HTTP while a rank is stuck.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/debug.h>
#include <paceline/record.h>

#include "base/unique_fd.h"
#include "support/eventually.h"
#include "support/shared.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using nlohmann::json;
using test::RankContext;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

base::UniqueFd connect_to(int port) {
  base::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool connects =
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  return connects ? std::move(socket) : base::UniqueFd();
}

base::UniqueFd connect_to(const std::string& path) {
  base::UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const bool connects =
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  return connects ? std::move(socket) : base::UniqueFd();
}

// All that the server at a port or a path sends after `request`, until it closes the connection.
template <typename Where>
std::string ask_socket(const Where& where, const std::string& request) {
  const base::UniqueFd socket = connect_to(where);
  if (!socket) return "no connection";
  EXPECT_EQ(::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  std::string answer;
  std::array<char, 4096> buffer{};
  for (ssize_t count = 0; (count = ::read(socket.get(), buffer.data(), buffer.size())) > 0;) {
    answer.append(buffer.data(), static_cast<std::size_t>(count));
  }
  return answer;
}

// The body of an answer of status 200; else the whole answer.
std::string body_of(const std::string& answer) {
  const auto end = answer.find("\r\n\r\n");
  return answer.starts_with("HTTP/1.1 200 ") ? answer.substr(end + 4) : answer;
}
std::string get(const std::string& path, const std::string& target) {
  return body_of(ask_socket(path, "GET " + target + " HTTP/1.1\r\n\r\n"));
}
std::string post(const std::string& path, const std::string& target) {
  return body_of(
      ask_socket(path, "POST " + target + " HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"));
}
std::string ask_as(int port, const std::string& headers) {
  return ask_socket(port, "GET /handler/ HTTP/1.1\r\n" + headers + "\r\n");
}
json state_at(const std::string& path) {
  return json::parse(post(path, "/handler/paceline_state"));
}

class DebugServers : public ::testing::Test {
 protected:
  std::string path(int rank) const { return directory_.path() / fmt::format("rank{}", rank); }

 private:
  const test::TemporaryDirectory directory_;
};

TEST_F(DebugServers, ShowTheCollectiveInWhichARankIsMissing) {
  const test::Shared<std::atomic<bool>> serving;
  const auto ends = test::run_torch_ranks(2, "paceline", [&](const RankContext& context) {
    const World world = init_process_group(context.init);
    const DebugServer server = start_debug_server({.socket = path(context.rank)});
    barrier();
    if (context.rank == 1) {
      // Rank 1 is the one that is missing. It looks at rank 0, which waits, and at itself.
      json state;
      EXPECT_TRUE(test::eventually([&] {
        state = state_at(path(0));
        return state["groups"][0]["ranks"][0]["waits"] == true;
      }));
      EXPECT_EQ(state["rank"], 0);
      EXPECT_EQ(state["world_size"], 2);
      EXPECT_EQ(state["backend"], "paceline");
      EXPECT_EQ(state["node"]["nodes"], 1);
      for (const int rank : {0, 1}) {
        const json group = state_at(path(rank))["groups"][0];
        EXPECT_EQ(group["name"], "world");
        EXPECT_EQ(group["rank"], rank);
        EXPECT_EQ(group["ranks"][0]["operation"], "all_reduce of 3 float64");
        EXPECT_EQ(group["ranks"][0]["call"], 2);
        EXPECT_EQ(group["ranks"][1]["operation"], "barrier");
        EXPECT_EQ(group["ranks"][1]["call"], 1);
        EXPECT_EQ(group["ranks"][1]["waits"], false);
      }
    }
    all_reduce(torch::ones({3}, torch::kDouble));
    barrier();
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

TEST_F(DebugServers, ShowTheStepAndTheMessagesThatARankWaitsFor) {
  const auto ends = test::run_torch_ranks(2, "paceline", [&](const RankContext& context) {
    const World world = init_process_group(context.init);
    const DebugServer server = start_debug_server({.socket = path(context.rank)});
    DistributedDataParallel model(torch::nn::Linear(2, 2));
    auto received = torch::zeros({4});
    Work message = context.rank == 0 ? recv_async(received, {.src = 1}) : Work();
    barrier();
    auto output = model(torch::ones({1, 2}));
    if (context.rank == 1) {
      json step;
      EXPECT_TRUE(test::eventually([&] {
        const json steps = state_at(path(0))["steps"];
        if (steps.empty()) return false;
        step = steps.back();
        return step["ranks"][0]["phase"] == "waits";
      }));
      EXPECT_EQ(step["group"], "world");
      EXPECT_EQ(step["step"], 1);
      EXPECT_THAT(step["buckets"][0].get<std::string>(), HasSubstr("weight"));
      EXPECT_EQ(step["ranks"][1]["phase"], "forward");
      EXPECT_EQ(step["ranks"][1]["buckets_ready"], 0);
      EXPECT_THAT(state_at(path(0))["groups"][0]["messages"].dump(),
                  HasSubstr("recv of 4 float32 from rank 1 with tag 0 in group world"));
    }
    output.sum().backward();
    if (context.rank == 1) send(received, 0);
    message.wait();
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

// Rank 0's recorder has the call in which rank 1 is missing, and the calls before it.
TEST_F(DebugServers, ShowTheFlightRecorderOfOurCalls) {
  const auto ends = test::run_torch_ranks(2, "paceline", [&](const RankContext& context) {
    ::setenv("TORCH_FR_BUFFER_SIZE", "100", 1);
    const World world = init_process_group(context.init);
    const DebugServer server = start_debug_server({.socket = path(context.rank)});
    barrier();
    if (context.rank == 1) {
      EXPECT_TRUE(test::eventually(
          [&] { return state_at(path(0))["groups"][0]["ranks"][0]["waits"] == true; }));
      const json trace = json::parse(post(path(0), "/handler/fr_trace_json?backend=paceline"));
      // The handler has what is under way.
      EXPECT_EQ(trace["entries"].size(), 1u) << trace.dump(1);
      const json& stuck = trace["entries"][0];
      EXPECT_EQ(stuck["profiling_name"], "paceline:all_reduce");
      EXPECT_EQ(stuck["state"], "scheduled");
      EXPECT_EQ(stuck["input_sizes"].dump(), "[[3]]");
    }
    auto tensor = torch::ones({3});
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<float>(), 2);
    const json all = json::parse(c10d::dump_fr_trace_json(true, false, "paceline"));
    EXPECT_EQ(all["entries"].size(), 2u);
    EXPECT_EQ(all["entries"][0]["profiling_name"], "paceline:barrier");
    for (const json& entry : all["entries"]) EXPECT_EQ(entry["state"], "completed");
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

TEST_F(DebugServers, ServeTheHandlersThatTheFrontendAsksFor) {
  const DebugServer server = start_debug_server({.socket = path(0)});
  const json names = json::parse(get(path(0), "/handler/"));
  for (const char* name : {"dump_traceback", "fr_trace_json", "fr_dump_file", "c10d_health_check",
                           "wait_counter_values", "pyspy_dump", "paceline_state"}) {
    EXPECT_THAT(names, Contains(name));
  }
  EXPECT_EQ(json::parse(get(path(0), "/")), names);
  EXPECT_TRUE(json::parse(post(path(0), "/handler/wait_counter_values?")).is_object());
  EXPECT_TRUE(
      json::parse(post(path(0), "/handler/fr_trace_json?backend=paceline")).contains("version"));
  EXPECT_EQ(state_at(path(0))["pid"], ::getpid());
  EXPECT_THAT(post(path(0), "/handler/dump_traceback"),
              AllOf(HasSubstr(fmt::format("Thread {} (", ::getpid())), HasSubstr(": runs")));
}

TEST_F(DebugServers, RefuseWhatIsNoRequestOfTheirs) {
  const DebugServer server = start_debug_server({.socket = path(0)});
  EXPECT_THAT(post(path(0), "/handler/nothing"),
              AllOf(StartsWith("HTTP/1.1 404"), HasSubstr("no handler nothing; there are ")));
  EXPECT_THAT(get(path(0), "/handler/paceline_state"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(ask_socket(path(0), "x\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(ask_socket(path(0), "POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n"),
              StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(ask_socket(path(0), "POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
              StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(ask_socket(path(0), std::string(40'000, 'x')), IsEmpty());
  EXPECT_EQ(state_at(path(0))["pid"], ::getpid()) << "it goes on";
}

// As a page does that has the name of its own server lead here, or that asks across sites.
TEST_F(DebugServers, RefuseRequestsOfPagesInABrowser) {
  const DebugServer server = start_debug_server({.publish = false});
  for (const char* host : {"localhost", "LocalHost:80", "127.0.0.1:1", "127.9.9.9", "[::1]:80"}) {
    EXPECT_THAT(ask_as(server.port(), fmt::format("Host: {}\r\n", host)),
                StartsWith("HTTP/1.1 200 "))
        << host;
  }
  for (const char* host :
       {"evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.evil.example",
        "localhost.evil.example", "10.1.2.3", "[fe80::1]:80", "[", ""}) {
    EXPECT_THAT(ask_as(server.port(), fmt::format("Host: {}\r\n", host)),
                AllOf(StartsWith("HTTP/1.1 403 Forbidden"), HasSubstr("expected 127.0.0.1")))
        << host;
  }
  EXPECT_THAT(ask_as(server.port(), ""), StartsWith("HTTP/1.1 403 "));
  EXPECT_THAT(ask_as(server.port(), "Host: localhost\r\nHost: localhost\r\n"),
              StartsWith("HTTP/1.1 400 "));
  for (const char* origin : {"Origin: http://evil.example", "origin: null", "ORIGIN:"}) {
    EXPECT_THAT(ask_as(server.port(), fmt::format("Host: localhost\r\n{}\r\n", origin)),
                AllOf(StartsWith("HTTP/1.1 403 "), HasSubstr("web pages")))
        << origin;
  }
}

TEST_F(DebugServers, AnswerAtTheNameAndTheAddressesOfTheirMachine) {
  std::array<char, 256> name{};
  ASSERT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  const DebugServer server = start_debug_server({.host = "0.0.0.0", .publish = false});
  EXPECT_EQ(server.address(), fmt::format("http://{}:{}", name.data(), server.port()));
  for (const std::string& host :
       std::vector<std::string>{name.data(), "10.1.2.3", "[fd00::1]", "localhost"}) {
    EXPECT_THAT(ask_as(server.port(), fmt::format("Host: {}:{}\r\n", host, server.port())),
                StartsWith("HTTP/1.1 200 "))
        << host;
  }
  EXPECT_THAT(ask_as(server.port(), "Host: evil.example\r\n"), StartsWith("HTTP/1.1 403 "));
}

TEST_F(DebugServers, AnswerWhileOtherConnectionsAreIdle) {
  const DebugServer server = start_debug_server({.socket = path(0)});
  std::vector<base::UniqueFd> idle;
  for (int i = 0; i < 40; ++i) idle.push_back(connect_to(path(0)));
  idle.push_back(connect_to(path(0)));
  ASSERT_EQ(::send(idle.back().get(), "GET //// HTTP", 13, MSG_NOSIGNAL), 13);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(state_at(path(0))["pid"], ::getpid());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(9))
      << "an idle connection may last 10 s";
  // The oldest have given way; the newest goes on.
  std::array<char, 1> byte{};
  EXPECT_EQ(::recv(idle.front().get(), byte.data(), 1, 0), 0);
  const std::string rest = "/1.1\r\n\r\n";
  ASSERT_EQ(::send(idle.back().get(), rest.data(), rest.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(rest.size()));
  EXPECT_EQ(::recv(idle.back().get(), byte.data(), 1, 0), 1);
}

TEST_F(DebugServers, ReplaceTheSocketThatAKilledProcessLeft) {
  const auto ends = test::run_torch_ranks(1, "paceline", [&](const RankContext&) -> std::string {
    const DebugServer server = start_debug_server({.socket = path(0)});
    ::raise(SIGKILL);
    return "";
  });
  ASSERT_TRUE(std::filesystem::exists(path(0))) << ends[0].report;
  const DebugServer server = start_debug_server({.socket = path(0)});
  EXPECT_EQ(state_at(path(0))["pid"], ::getpid());
}

TEST_F(DebugServers, DoNotReplaceAnythingElse) {
  std::ofstream(path(0)) << "data";
  std::filesystem::create_symlink(path(1), path(2));
  for (const int taken : {0, 2}) {
    EXPECT_THAT([&] { static_cast<void>(start_debug_server({.socket = path(taken)})); },
                ::testing::ThrowsMessage<Error>(HasSubstr("EADDRINUSE")));
  }
  EXPECT_EQ(std::filesystem::file_size(path(0)), 4u);
  EXPECT_TRUE(std::filesystem::is_symlink(path(2)));
}

TEST_F(DebugServers, LeaveNothingAndKeepOthersOut) {
  {
    DebugServer server = start_debug_server({.socket = path(0)});
    struct stat status {};
    ASSERT_EQ(::stat(path(0).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
    EXPECT_EQ(server.port(), -1);
    EXPECT_EQ(server.address(), path(0));
    EXPECT_THAT([&] { static_cast<void>(start_debug_server({.socket = path(0)})); },
                ::testing::ThrowsMessage<Error>(
                    AllOf(HasSubstr("EADDRINUSE"), HasSubstr("needs a path of its own"))));
    EXPECT_EQ(state_at(path(0))["pid"], ::getpid()) << "it is still there";
  }
  EXPECT_FALSE(std::filesystem::exists(path(0)));
}

TEST_F(DebugServers, RejectInvalidOptions) {
  EXPECT_THROW(static_cast<void>(start_debug_server({.worker_port = 65536})), UsageError);
  EXPECT_THROW(static_cast<void>(start_debug_server({.worker_port = -1})), UsageError);
  EXPECT_THROW(static_cast<void>(start_debug_server({.socket = std::string(200, 'x')})),
               UsageError);
  EXPECT_THROW(static_cast<void>(start_debug_server({.socket = path(0) + "/missing/socket"})),
               Error);
}

TEST_F(DebugServers, ListenAtALoopbackPortIfNotToldOtherwise) {
  const DebugServer server = start_debug_server({.publish = false});
  EXPECT_GT(server.port(), 0);
  EXPECT_EQ(server.address(), fmt::format("http://127.0.0.1:{}", server.port()));
}

TEST_F(DebugServers, StartInRecordAtTheSocketThatPyTorchsVariableNames) {
  const auto ends = test::run_torch_ranks(1, "paceline", [&](const RankContext&) {
    ::setenv("TORCH_WORKER_SERVER_SOCKET", path(0).c_str(), 1);
    EXPECT_EQ(record([&] { EXPECT_EQ(state_at(path(0))["pid"], ::getpid()); }), 0);
    EXPECT_FALSE(std::filesystem::exists(path(0)));
    return std::string();
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
}

// As all ranks of a job do that inherit one variable, after a job that was killed.
TEST_F(DebugServers, OfRanksWithOnePathAreOneAndTheOthersSayWhy) {
  ASSERT_EQ(::mknod(path(0).c_str(), S_IFSOCK | 0600, 0), 0);
  constexpr int kRanks = 4;
  const test::Shared<std::atomic<int>> started;
  const test::Shared<std::atomic<int>> refused;
  const auto ends = test::run_torch_ranks(kRanks, "paceline", [&](const RankContext&) {
    ::setenv("TORCH_WORKER_SERVER_SOCKET", path(0).c_str(), 1);
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(record([&] {
                ++*started;
                EXPECT_TRUE(test::eventually([&] { return *started >= kRanks; }));
                if (state_at(path(0))["pid"] != ::getpid()) ++*refused;
                ++*started;
                EXPECT_TRUE(test::eventually([&] { return *started >= 2 * kRanks; }));
              }),
              0);
    return ::testing::internal::GetCapturedStderr();
  });
  int warned = 0;
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    if (end.report.empty()) continue;
    ++warned;
    EXPECT_THAT(end.report, AllOf(HasSubstr("TORCH_WORKER_SERVER_SOCKET: "), HasSubstr(path(0)),
                                  HasSubstr("rank, needs a path of its own")));
  }
  EXPECT_EQ(warned, kRanks - 1);
  EXPECT_EQ(refused->load(), kRanks - 1);
}

}  // namespace
}  // namespace paceline
