#include "weft/core/fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>

namespace weft {

enum class Colour { red, green };
template <>
struct EnumNames<Colour> {
  static constexpr std::array<const char*, 2> list{"red", "green"};
};

namespace {

struct Options {
  int64_t count = 1;
  double rate = 0.1;
  bool on = false;
  std::string name = "a\"b";
  std::vector<int64_t> shape = {2, 3};
  std::optional<Colour> colour = {};
  at::ScalarType dtype = at::kBFloat16;
  static constexpr auto fields() {
    return std::tuple{Field{"count", &Options::count, ParamKind::required},
                      Field{"rate", &Options::rate},
                      Field{"on", &Options::on},
                      Field{"name", &Options::name},
                      Field{"shape", &Options::shape},
                      Field{"colour", &Options::colour},
                      Field{"dtype", &Options::dtype}};
  }
};

TEST(Fields, TextRoundTrips) {
  Options options{.count = -7, .rate = 1.0 / 3, .on = true, .colour = Colour::green};
  Options other;
  for (const auto& field : list_fields(options)) {
    const auto printed = to_text(field.value);
    Parser text(printed);
    set_field(other, "Options", field.name, text.value());
    EXPECT_TRUE(text.at_end()) << field.name;
  }
  EXPECT_EQ(other.count, -7);
  EXPECT_EQ(other.rate, 1.0 / 3) << "a double must survive the text exactly";
  EXPECT_TRUE(other.on);
  EXPECT_EQ(other.name, "a\"b");
  EXPECT_EQ(other.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(other.colour, Colour::green);
  EXPECT_EQ(other.dtype, at::kBFloat16);
}

TEST(Fields, IntegerConvertsToDoubleAndToShape) {
  Options options;
  set_field(options, "Options", "rate", int64_t{2});
  set_field(options, "Options", "shape", int64_t{5});
  EXPECT_EQ(options.rate, 2.0);
  EXPECT_EQ(options.shape, std::vector<int64_t>{5});
}

TEST(Fields, RejectInvalidValues) {
  Options options;
  try {
    set_field(options, "Options", "colour", std::string("blue"));
    FAIL() << "an unknown name must raise";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr(R"(Options: colour must be "red" or "green" or none, got "blue".)"));
  }
  EXPECT_THROW(set_field(options, "Options", "count", 0.5), c10::ValueError);
  EXPECT_THROW(set_field(options, "Options", "weight", 0.5), c10::TypeError);
}

TEST(Values, DoublesStayDoublesInText) {
  for (const double x : {1.0, -0.0, 1e300, 5e-324, std::numeric_limits<double>::infinity()}) {
    const auto text = to_text(x);
    Parser parser(text);
    const auto value = parser.value();
    ASSERT_TRUE(std::holds_alternative<double>(value)) << text;
    EXPECT_EQ(std::get<double>(value), x);
  }
}

}  // namespace
}  // namespace weft
