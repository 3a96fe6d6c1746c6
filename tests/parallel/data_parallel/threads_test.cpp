#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <torch/torch.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <latch>
#include <mutex>
#include <set>
#include <thread>

#include <paceline/autocast.h>
#include <paceline/data_parallel.h>

#include "parallel/data_parallel/nets.h"

namespace paceline {
namespace {

using test::make;
using test::random_batch;
using test::TwoLayers;
using test::TwoLayersImpl;
using testing::Each;
using testing::ElementsAre;

std::ptrdiff_t threads_of_process() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// What `function` returns in each of three replicas, by replica.
template <typename Function>
std::vector<std::int64_t> in_replicas(const Function& function) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 3});
  const auto values = model.parallel_apply(
      [&](TwoLayersImpl&, const at::Tensor&) {
        return at::tensor(static_cast<std::int64_t>(function()));
      },
      at::ones(3));
  return {values.template const_data_ptr<std::int64_t>(),
          values.template const_data_ptr<std::int64_t>() + 3};
}

TEST(DataParallelThreads, EndWithTheWrapper) {
  const auto before = threads_of_process();
  at::Tensor loss;
  {
    DataParallel model(make<TwoLayers>(), {.num_replicas = 4});
    EXPECT_EQ(threads_of_process(), before + 3);
    for (int step = 0; step < 5; ++step) {
      loss = model(random_batch(8)).sum();
      loss.backward();
    }
    EXPECT_EQ(threads_of_process(), before + 3);
  }
  EXPECT_EQ(threads_of_process(), before);  // although there is an output
}

TEST(DataParallelThreads, EachReplicaKeepsItsThread) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 3});
  std::mutex mutex;
  std::set<std::thread::id> seen;
  for (int step = 0; step < 5; ++step) {
    model.parallel_apply(
        [&](TwoLayersImpl&, const at::Tensor&) {
          const std::scoped_lock lock(mutex);
          seen.insert(std::this_thread::get_id());
        },
        at::ones(3));
  }
  EXPECT_EQ(seen.size(), 3);
  EXPECT_EQ(seen.count(std::this_thread::get_id()), 1);
}

TEST(DataParallelThreads, BlockSignals) {
  const auto blocks_sigterm = [] {
    sigset_t mask{};
    ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    return ::sigismember(&mask, SIGTERM);
  };
  EXPECT_THAT(in_replicas(blocks_sigterm), ElementsAre(0, 1, 1));
}

TEST(DataParallelThreads, ShareTheIntraopThreads) {
  const int before = at::get_num_threads();
  for (const auto& [threads, share] : {std::pair(7, 2), {3, 1}, {1, 1}}) {
    at::set_num_threads(threads);
    EXPECT_THAT(in_replicas([] { return at::get_num_threads(); }), Each(share));
    EXPECT_EQ(at::get_num_threads(), threads);
    EXPECT_ANY_THROW(in_replicas([]() -> int { throw std::runtime_error("bad"); }));
    EXPECT_EQ(at::get_num_threads(), threads);
  }
  at::set_num_threads(before);
}

TEST(DataParallelThreads, HaveTheCallersModes) {
  const auto grad_mode = [] { return at::GradMode::is_enabled(); };
  EXPECT_THAT(in_replicas(grad_mode), Each(1));
  {
    const torch::NoGradGuard guard;
    EXPECT_THAT(in_replicas(grad_mode), Each(0));
  }
  const auto inference = [] { return c10::InferenceMode::is_enabled(); };
  EXPECT_THAT(in_replicas(inference), Each(0));
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  {
    const c10::InferenceMode guard;
    EXPECT_THAT(in_replicas(inference), Each(1));
    EXPECT_TRUE(model(random_batch(4)).is_inference());
  }
  EXPECT_TRUE(model(random_batch(4)).requires_grad());
}

TEST(DataParallelThreads, HaveTheCallersAutocast) {
  const auto dtype = [] {
    return static_cast<int>(at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type());
  };
  const auto caches = [] { return at::autocast::is_autocast_cache_enabled(); };
  EXPECT_THAT(in_replicas(dtype), Each(static_cast<int>(at::kFloat)));
  {
    const autocast guard(at::kCPU, {.dtype = at::kHalf, .cache_enabled = false});
    EXPECT_THAT(in_replicas(dtype), Each(static_cast<int>(at::kHalf)));
    EXPECT_THAT(in_replicas(caches), Each(0));
  }
  EXPECT_THAT(in_replicas(dtype), Each(static_cast<int>(at::kFloat)));
  EXPECT_THAT(in_replicas(caches), Each(1));
}

struct MatrixImpl : torch::nn::Cloneable<MatrixImpl> {
  MatrixImpl() { reset(); }
  void reset() override { weight = register_parameter("weight", torch::randn({16, 16})); }
  at::Tensor forward(const at::Tensor& x) { return x.mm(weight); }
  at::Tensor weight;
};
TORCH_MODULE(Matrix);

// Uses the parameter 20 times. It is converted once, and its gradient is added up in bfloat16.
at::Tensor sum_in_autocast(MatrixImpl& matrix, const at::Tensor& x,
                           const std::function<void()>& halfway = {}) {
  const autocast guard(at::kCPU);
  at::Tensor sum = torch::zeros({x.size(0), 16});
  for (int i = 0; i < 20; ++i) {
    if (i == 10 && halfway) halfway();
    sum = sum + matrix.forward(x + i);
  }
  return sum;
}

TEST(DataParallelThreads, AutocastEndsInAReplicaWithoutEffectOnTheOthers) {
  torch::manual_seed(1);
  Matrix net;
  const auto x = torch::randn({8, 16});
  at::Tensor expected = torch::zeros({16, 16});
  for (const auto& part : x.chunk(2)) {
    net->zero_grad();
    sum_in_autocast(*net, part).sum().backward();
    expected += net->weight.grad();
  }
  net->zero_grad();
  DataParallel model(net, {.num_replicas = 2});
  std::latch others_scope_ended(1);
  const auto forward = [&](MatrixImpl& replica, const at::Tensor& part, const at::Tensor& other) {
    if (!other[0].item<bool>()) {
      return sum_in_autocast(replica, part, [&] { others_scope_ended.wait(); });
    }
    const auto y = sum_in_autocast(replica, part);
    others_scope_ended.count_down();
    return y;
  };
  model.parallel_apply(forward, x, torch::arange(8) >= 4).sum().backward();
  EXPECT_TRUE(net->weight.grad().equal(expected));
}

TEST(DataParallelThreads, AutocastWithinReplicasSeesNewValues) {
  Matrix net;
  DataParallel model(net, {.num_replicas = 2});
  const auto forward = [](MatrixImpl& replica, const at::Tensor& x) {
    return sum_in_autocast(replica, x);
  };
  const auto x = torch::ones({2, 16});
  model.parallel_apply(forward, x);
  {
    const torch::NoGradGuard guard;
    net->weight.add_(1);
  }
  const auto got = model.parallel_apply(forward, x);
  EXPECT_TRUE(got.equal(forward(*net, x)));
}

TEST(DataParallelThreads, CountWhatTheyHaveDone) {
  DataParallel model(make<TwoLayers>(), {.num_replicas = 2});
  model(random_batch(5)).sum().backward();
  const DataParallelStats& stats = model.stats();
  ASSERT_EQ(stats.replicas.size(), 2);
  EXPECT_EQ(stats.replicas[0].samples, 3);
  EXPECT_EQ(stats.replicas[1].samples, 2);
  for (const auto& replica : stats.replicas) {
    EXPECT_GT(replica.forward.count(), 0);
    EXPECT_GT(replica.backward.count(), 0);
  }
  for (const auto& time : {stats.scatter, stats.gather, stats.sum}) EXPECT_GT(time.count(), 0);
}

TEST(DataParallelThreads, HaveADefaultNumber) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  EXPECT_EQ(DataParallel(make<TwoLayers>()).stats().replicas.size(), 1);
  at::set_num_threads(1000);
  EXPECT_LE(DataParallel(make<TwoLayers>()).stats().replicas.size(),
            std::thread::hardware_concurrency());
  at::set_num_threads(before);
}

}  // namespace
}  // namespace paceline
