#pragma once

/// @file
/// Lets PyTorch's debug frontend, `torch.distributed.debug`, look into a running rank.

#include <paceline/api.h>

#include <memory>
#include <string>

namespace paceline {

/// Where a rank's debug server listens.
struct DebugServerOptions {
  /// The address to listen at. Any client that reaches it may read the rank's state: there is no
  /// authentication, and only requests of web pages in a browser are refused. The frontend of a job
  /// on several machines needs "::", or the machine's address in a trusted network.
  std::string host = "127.0.0.1";
  /// The TCP port, as in PyTorch; 0: any free one.
  int worker_port = 0;
  /// A path: listen at a Unix socket of this name in place of host and port. Only this user may
  /// connect. Nothing may be there yet, except the socket of a process that was killed; the server
  /// removes it at its end.
  std::string socket{};
  /// Writes the address into the store at MASTER_ADDR:MASTER_PORT, where the frontend looks for it.
  /// If no launcher serves that store, rank 0 does. Nothing is written for a Unix socket, or if
  /// these variables are not set.
  bool publish = true;
};

/// A rank's debug server, for as long as this object lives. Move-only.
class [[nodiscard]] PACELINE_API DebugServer {
 public:
  /// The server goes on in the new object; `other` has none any more.
  DebugServer(DebugServer&& other) noexcept;
  /// The same; a server that this object had ends.
  DebugServer& operator=(DebugServer&& other) noexcept;
  ~DebugServer();

  /// The port; -1 for a Unix socket.
  [[nodiscard]] int port() const;
  /// "http://127.0.0.1:41234", or the path of the Unix socket.
  [[nodiscard]] std::string address() const;

 private:
  friend DebugServer start_debug_server(const DebugServerOptions& options);
  struct State;
  explicit DebugServer(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

/// Starts this rank's server of PyTorch's debug handlers, in place of PyTorch's WorkerServer; the
/// frontend is a program of its own (docs/debugging.md). It serves the handlers of LibTorch
/// (`fr_trace_json`, `c10d_health_check`, `wait_counter_values`, ...), `dump_traceback` and
/// `paceline_state`, on a thread of its own, also while the rank hangs in a collective.
///
/// No server runs unless the program calls this, or runs in record() with the variable
/// TORCH_WORKER_SERVER_SOCKET, as in PyTorch. Throws UsageError for invalid options; Error if it
/// cannot listen there, or cannot reach the store within 30 s.
PACELINE_API DebugServer start_debug_server(const DebugServerOptions& options = {});

}  // namespace paceline
