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
    return std::tuple{Field{"count", &Options::count, "How many.", ParamKind::required},
                      Field{"rate", &Options::rate, "Per second."},
                      Field{"on", &Options::on, "Enabled."},
                      Field{"name", &Options::name, "Of the object."},
                      Field{"shape", &Options::shape, "Of the object."},
                      Field{"colour", &Options::colour, "None means transparent."},
                      Field{"dtype", &Options::dtype, "Of the values."}};
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

TEST(Fields, DocsHaveTypesAndDescriptions) {
  std::string text;
  for (const auto& doc : list_field_docs<Options>()) text += doc.type + ": " + doc.description + "\n";
  EXPECT_EQ(
      text,
      "int: How many.\nfloat: Per second.\nbool: Enabled.\nstr: Of the object.\nint | Sequence[int]: Of the object.\n"
      "str | None: None means transparent.\nstr: Of the values.\n");
}

template <class... Arguments>
constexpr bool kMakesField = requires(Arguments... arguments) { Field{arguments...}; };
static_assert(kMakesField<const char*, int64_t Options::*, const char*>);
static_assert(!kMakesField<const char*, int64_t Options::*>, "a field needs a description");
static_assert(!kMakesField<const char*, int64_t Options::*, ParamKind>, "a field needs a description");

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
    EXPECT_THAT(error.what(), testing::HasSubstr(R"(Options: colour is "blue", expected one of red, green or None.)"));
  }
  EXPECT_THROW(set_field(options, "Options", "count", 0.5), c10::TypeError);
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
