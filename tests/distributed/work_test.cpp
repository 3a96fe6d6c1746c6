#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>
#include <paceline/record.h>

#include "support/torch_ranks.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::expect_torch_ranks;

// The other rank waits for a message, and not in the call.
TEST(Work, UnderWayDoesNotKeepAnExceptionFromTheOtherRanks) {
  for (const std::string& backend : test::backends()) {
    const auto ends = test::run_torch_ranks(2, backend, [](const test::RankContext& context) {
      const auto begin = std::chrono::steady_clock::now();
      const int code = record([&] {
        const World world = init_process_group(context.init);
        auto t = torch::ones({4});
        barrier();
        if (context.rank == 1) recv(t, {.src = 0});
        Work work = all_reduce_async(t);
        throw std::runtime_error("the disk is full");
      });
      EXPECT_EQ(code, 1);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, context.init.timeout / 2);
      return std::string();
    });
    for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << backend << end.report;
  }
}

TEST(Work, AcceptsTheLongestTimeout) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    auto t = torch::full({2}, rank);
    if (rank == 0) {
      auto asked = torch::zeros({1});
      recv(asked, {.src = 1});
      send(t, 1);
      return;
    }
    Work work = recv_async(t, {.src = 0});
    auto waiting =
        std::async(std::launch::async, [&] { return work.wait(std::chrono::milliseconds::max()); });
    EXPECT_EQ(waiting.wait_for(100ms), std::future_status::timeout);
    send(torch::zeros({1}), 0);
    EXPECT_NO_THROW(waiting.get());
    EXPECT_EQ(t[0].item<float>(), 0);
  });
}

// PowerSGD's hook does this.
TEST(Futures, ACallbackMayWaitForALaterCall) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> first{torch::ones({10})};
    std::vector<at::Tensor> second{torch::ones({10})};
    std::vector<at::Tensor> third{torch::ones({10})};
    const auto after = backend->allreduce(first)->getFuture()->then(
        [&](c10::ivalue::Future&) {
          backend->allreduce(second)
              ->getFuture()
              ->then(
                  [&](c10::ivalue::Future&) {
                    backend->allreduce(third)->getFuture()->wait();
                    return c10::IValue();
                  },
                  c10::NoneType::get())
              ->wait();
          return c10::IValue();
        },
        c10::NoneType::get());
    after->wait();
    for (const auto& tensors : {first, second, third}) EXPECT_EQ(tensors[0][0].item<float>(), 2);
  });
}

TEST(Futures, ACallbackMayWaitForAnotherMessage) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> a{torch::full({5}, static_cast<float>(rank))};
    std::vector<at::Tensor> b{torch::full({5}, static_cast<float>(10 + rank))};
    if (rank == 0) {
      const auto one = backend->send(a, 1, 0);
      const auto two = backend->send(b, 1, 1);
      one->wait();
      two->wait();
    } else {
      const auto one = backend->recv(a, 0, 0)->getFuture();
      const auto two = backend->recv(b, 0, 1)->getFuture();
      one->then(
             [two](c10::ivalue::Future&) {
               two->wait();
               return c10::IValue();
             },
             c10::NoneType::get())
          ->wait();
      EXPECT_EQ(a[0][0].item<float>(), 0);
      EXPECT_EQ(b[0][0].item<float>(), 10);
    }
    barrier();
  });
}

TEST(Futures, HoldTheTensorsAndTheError) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto backend = ProcessGroup().c10d()->getBackend(at::kCPU);
    std::vector<at::Tensor> tensors{torch::ones({10})};
    auto future = backend->allreduce(tensors)->getFuture();
    future->waitAndThrow();
    EXPECT_TRUE(future->value().toTensorVector()[0].eq(2).all().item<bool>());
    tensors = {torch::ones({10 + rank})};
    future = backend->allreduce(tensors)->getFuture();
    EXPECT_THROW(future->waitAndThrow(), Mismatch);
    EXPECT_EQ(backend->getError(), c10d::ErrorType::COMM_ERROR);
  });
}

}  // namespace
}  // namespace paceline
