#include <paceline/parameter_server.h>

#include <fmt/format.h>

#include <exception>
#include <utility>

#include <paceline/error.h>

#include "base/log.h"
#include "distributed/translate.h"
#include "parallel/parameter_server/protocol.h"
#include "parallel/parameter_server/server.h"
#include "parallel/parameter_server/worker.h"

namespace paceline {

namespace {

void check_server_options(const ParameterServerOptions& options) {
  if (options.servers < 1) {
    throw UsageError(
        fmt::format("ParameterServer with {} servers: at least one is needed", options.servers));
  }
  if (options.staleness.value_or(0) < 0) {
    throw UsageError(fmt::format(
        "ParameterServer with a staleness of {}: it must not be negative; leave it unset for "
        "asynchronous training",
        *options.staleness));
  }
}

std::unique_ptr<parameter_server::Job> enter_job(const ParameterServerOptions& options) {
  auto job = std::make_unique<parameter_server::Job>(options);
  if (job->size() > options.servers) return job;
  throw UsageError(fmt::format(
      "ParameterServerOptions::servers is {}, and the world's size {}, so no rank is left to be a "
      "worker: use fewer servers, or start more ranks",
      options.servers, job->size()));
}

}  // namespace

ParameterServer::ParameterServer(const ddp::WrappedModel& model,
                                 const MakeOptimizer& make_optimizer,
                                 const ParameterServerOptions& options)
    : exceptions_at_start_(std::uncaught_exceptions()) {
  check_server_options(options);
  const auto parameters = parameter_server::served_parameters(model, options.servers);
  auto job = enter_job(options);
  const auto places = parameter_server::shards_of(parameters, options.servers);
  std::vector<parameter_server::Tensors> shards;
  for (const auto& shard : places) {
    shards.push_back(parameter_server::shard_of(parameters, shard));
  }
  const std::string description = parameter_server::describe(model, options);
  if (job->rank() >= options.servers) {
    worker_ = std::make_unique<parameter_server::Worker>(std::move(job), shards, description);
    return;
  }
  const auto& own = shards[static_cast<std::size_t>(job->rank())];
  // Before the optimizer is made, so that workers notice a server that ends there.
  parameter_server::Server::announce(*job);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  try {
    optimizer = make_optimizer(own);
    if (!optimizer) throw UsageError("ParameterServer: make_optimizer returned no optimizer");
  } catch (...) {
    job->announce_end();
    throw;
  }
  server_ = std::make_unique<parameter_server::Server>(
      std::move(job), parameter_server::Shard(own, std::move(optimizer)), description, options);
}

ParameterServer::ParameterServer(torch::nn::Module& module, const MakeOptimizer& make_optimizer,
                                 const ParameterServerOptions& options)
    : ParameterServer(ddp::WrappedModel(module), make_optimizer, options) {}

ParameterServer::ParameterServer(const NamedTensors& parameters,
                                 const MakeOptimizer& make_optimizer,
                                 const ParameterServerOptions& options)
    : ParameterServer(ddp::WrappedModel(parameters, NamedTensors()), make_optimizer, options) {}

ParameterServer::~ParameterServer() {
  if (!worker_) return;
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    worker_->abort("an exception left its ParameterServer: see its output");
    return;
  }
  try {
    leave();
  } catch (const std::exception&) {
    base::log(LogLevel::debug, "leaving the parameter server: {}",
              distributed::current_exception_text());
  }
}

void ParameterServer::serve() {
  if (!server_) {
    throw UsageError(
        "serve on a worker: workers call push, pull or step, and ranks whose is_server() is true "
        "call serve");
  }
  server_->serve();
}

parameter_server::Worker& ParameterServer::worker(const char* operation) const {
  if (worker_) return *worker_;
  throw UsageError(
      fmt::format("{} on a server: ranks whose is_server() is true call serve", operation));
}

void ParameterServer::pull() {
  worker("pull").pull();
}

void ParameterServer::push() {
  worker("push").push();
}

void ParameterServer::step() {
  auto& its = worker("step");
  its.push();
  its.pull();
}

void ParameterServer::leave() {
  worker("leave").leave();
}

ParameterServerStats ParameterServer::stats() const {
  if (server_) return server_->stats();
  throw UsageError("stats on a worker: servers record what happens");
}

}  // namespace paceline
