#include "distributed/rendezvous/rendezvous_fixture.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>

#include "support/process_ranks.h"

namespace paceline::test {

std::string failure_to_join(InitOptions options) {
  const auto begin = std::chrono::steady_clock::now();
  std::string text = "joined";
  try {
    const World world = init_process_group(std::move(options));
  } catch (const UsageError& error) {
    text = fmt::format("UsageError: {}", error.what());
  } catch (const PeerError& error) {
    text = fmt::format("PeerError({}): {}", fmt::join(error.ranks(), ","), error.what());
  } catch (const Error& error) {
    text = fmt::format("Error: {}", error.what());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLate) << text;
  return text;
}

std::string failure_alone(const InitOptions& options,
                          const std::map<std::string, std::string>& environment) {
  const auto ends = run_process_ranks(1, [&](int, shm::BootstrapSockets) {
    set_variables(environment);
    return failure_to_join(options);
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
  return ends[0].report;
}

Port::Port() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(socket_.get(), at, length), 0);
  EXPECT_EQ(::getsockname(socket_.get(), at, &length), 0);
  number_ = ntohs(address.sin_port);
}

void Port::listen() const {
  EXPECT_EQ(::listen(socket_.get(), 16), 0);
}

void set_variables(const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace paceline::test
