#include "parallel/ddp/static_graph.h"

#include <gtest/gtest.h>

namespace paceline::ddp {
namespace {

using Gradient = StaticGraph::Gradient;

TEST(StaticGraph, DisabledExpectsOneGradientForEachParameter) {
  StaticGraph graph(2, false);
  graph.begin_step();
  EXPECT_FALSE(graph.counting());
  EXPECT_EQ(graph.add(1), Gradient::last);
  EXPECT_EQ(graph.add(1), Gradient::surplus);
  EXPECT_EQ(graph.arrived(0), 0);
  EXPECT_EQ(graph.arrived(1), 2);
}

TEST(StaticGraph, CountsTheGradientsOfEachParameter) {
  StaticGraph graph(3, true);
  graph.begin_step();
  for (const std::size_t i : {0, 2, 0}) EXPECT_EQ(graph.add(i), Gradient::early);
  EXPECT_EQ(graph.record_counts(), (Indices{2, 0}));
  graph.end_step();

  graph.begin_step();
  EXPECT_FALSE(graph.counting());
  EXPECT_EQ(graph.expected(1), 0);
  EXPECT_EQ(graph.add(0), Gradient::early);
  EXPECT_EQ(graph.add(2), Gradient::last);
  EXPECT_EQ(graph.add(0), Gradient::last);
  EXPECT_EQ(graph.add(1), Gradient::surplus);
}

TEST(StaticGraph, CountsAgainAfterAnAbortedStep) {
  StaticGraph graph(2, true);
  graph.begin_step();
  graph.add(0);
  graph.add(0);
  graph.record_counts();
  graph.begin_step();
  EXPECT_TRUE(graph.counting());
  graph.add(1);
  EXPECT_EQ(graph.record_counts(), Indices{1});
  EXPECT_EQ(graph.expected(0), 0);
  EXPECT_EQ(graph.expected(1), 1);
}

TEST(StaticGraph, RecordsWhatOtherRanksUsed) {
  StaticGraph graph(2, true);
  graph.begin_step();
  graph.record_used({false, true});
  graph.end_step();
  EXPECT_EQ(graph.expected(0), 0);
  EXPECT_EQ(graph.expected(1), 1);
}

}  // namespace
}  // namespace paceline::ddp
