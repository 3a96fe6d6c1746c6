#pragma once

/// @file
/// Training with a parameter server.

#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <paceline/api.h>
#include <paceline/distributed.h>
#include <paceline/module_or_holder.h>
#include <paceline/named_tensors.h>
#include <paceline/parameter_server_stats.h>

namespace paceline {

namespace ddp {
class WrappedModel;
}
namespace parameter_server {
class Server;
class Worker;
}  // namespace parameter_server

/// Options of ParameterServer. Every rank must give the same, except for what `init` says about the
/// rank.
struct ParameterServerOptions {
  /// How many ranks are servers, the first ones of the job. The others are workers, at least one.
  int servers = 1;
  /// 0: synchronous. The gradients of all workers are averaged in the order of ranks and make one
  /// step of the optimizer.
  ///
  /// s > 0: stale synchronous parallel. Each gradient makes a step of its own, and no worker gets
  /// more than s steps ahead of the slowest one: its push waits.
  ///
  /// Unset: asynchronous. Each gradient makes a step of its own at once.
  std::optional<std::int64_t> staleness = 0;
  /// How this process enters the job, as for init_process_group: by the launcher's variables, an
  /// init_method or a store. It needs no world and makes none. `backend` must be "paceline" and
  /// `enable_reconfigure` false. `timeout` limits the wait for other ranks at the start, and in
  /// push and pull for steps of other workers. A server that hangs is noticed 5 s later; so no step
  /// of the optimizer may take longer.
  InitOptions init{};
};

/// Servers hold the parameters of a model and their optimizer; workers compute gradients, and may
/// come and go (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI
/// 2014; Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
/// Server", NeurIPS 2013). docs/parallelism.md compares the modes.
///
///     ParameterServer server(model, [](std::vector<at::Tensor> parameters) {
///       return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.1);
///     }, {.staleness = 4});
///     if (server.is_server()) {
///       server.serve();
///     } else {
///       for (auto& batch : *loader) {
///         model->zero_grad();
///         loss(model, batch).backward();
///         server.step();
///       }
///       server.leave();
///     }
///
/// **Parameters** are dense tensors on the CPU. Each server holds some of them, whole tensors, so
/// that all hold about as many bytes. Training starts with the servers' values. Buffers are each
/// worker's own. A tensor that takes no gradient is held too.
///
/// **Loss of a worker.** Each pair of a server and a worker has a connection of its own, so the end
/// of a worker's process costs what it was about to send. A gradient counts, once, for each server
/// that it has reached whole; if the worker ends in the middle of a push, that may be some of the
/// servers. The other workers go on. Without a launcher's help a worker that ends before it comes
/// is noticed after the timeout.
///
/// **New workers.** A new process may come under the rank of one that has ended, as `paceline run
/// --max-replacements` starts it. It must make the same ParameterServers as the first one, in the
/// same order. It takes part from the next step on. Over file://, where a rank comes once, it is
/// refused.
///
/// **Loss of a server** is an error on all workers: PeerLost, which names it. Further calls throw
/// too, and so does the constructor in a new process under its rank, since what it held is lost.
///
/// Errors are PeerLost, Timeout, which names the server or the workers that are late, UsageError,
/// and Mismatch, which names the first difference between this rank's model or options and a
/// server's. After an error other than UsageError the worker counts as lost. Use
/// an object on one thread at a time; stats() may be called on any thread.
class PACELINE_API ParameterServer {
 public:
  /// Makes the optimizer of some parameters, which it changes in place. The optimizer lives as long
  /// as the ParameterServer. Its step() runs on threads of the server, one call at a time; to save
  /// its state, keep a pointer, and read it after serve() has returned.
  using MakeOptimizer =
      std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;

  /// On a server, enters the job and calls `make_optimizer` with its parameters. On a worker, meets
  /// all servers and pulls. Both keep the parameters.
  ParameterServer(torch::nn::Module& module, const MakeOptimizer& make_optimizer,
                  const ParameterServerOptions& options = {});
  /// The same. Throws UsageError for a null module.
  template <typename M>
  ParameterServer(const torch::nn::ModuleHolder<M>& holder, const MakeOptimizer& make_optimizer,
                  const ParameterServerOptions& options = {})
      : ParameterServer(detail::checked_module(detail::module_of(holder), "ParameterServer"),
                        make_optimizer, options) {}
  /// Of named tensors.
  ParameterServer(const NamedTensors& parameters, const MakeOptimizer& make_optimizer,
                  const ParameterServerOptions& options = {});
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;
  /// A worker leaves, and waits for the servers as leave() does; while an exception unwinds through
  /// it, it counts as lost. A server that has not served ends.
  ~ParameterServer();

  /// Whether this rank is a server.
  bool is_server() const { return server_ != nullptr; }

  /// On a server: serves until no worker is left. This rank's parameters have the trained values
  /// then, but only those that it holds; a worker has all of them after pull().
  ///
  /// Throws PeerLost if all workers were lost and none has left; if the launcher replaces
  /// processes, only after none has come within the timeout. Throws what the optimizer throws, and
  /// the workers PeerLost with its text. UsageError on a worker, and if it was called before.
  void serve();

  /// On a worker: the parameters become the servers'. In synchronous mode they are the same on all
  /// workers.
  void pull();
  /// On a worker: sends the gradients, and returns once the optimizers have taken them. A parameter
  /// without a gradient is left out, unless another worker of the step has one. Throws UsageError
  /// for a gradient that is not dense.
  void push();
  /// push, then pull.
  void step();
  /// On a worker: does not take part any more. Waits until all servers know. Does nothing the
  /// second time.
  void leave();

  /// On a server: what it has done. UsageError on a worker.
  ParameterServerStats stats() const;

 private:
  [[gnu::visibility("hidden")]] ParameterServer(const ddp::WrappedModel& model,
                                                const MakeOptimizer& make_optimizer,
                                                const ParameterServerOptions& options);
  [[gnu::visibility("hidden")]] parameter_server::Worker& worker(const char* operation) const;

  std::unique_ptr<parameter_server::Server> server_;
  std::unique_ptr<parameter_server::Worker> worker_;
  int exceptions_at_start_;
};

}  // namespace paceline
