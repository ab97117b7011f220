//! A value of an option, as it passes through JSON and TOML.

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::ser::{Serialize, Serializer};
use std::fmt;

/// A value as the user typed it: a number, true or false, or a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TypedValue(pub String);

impl<'de> Deserialize<'de> for TypedValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;
        impl Visitor<'_> for Scalar {
            type Value = TypedValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, a text, true or false")
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<TypedValue, E> {
                Ok(TypedValue(value.to_string()))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<TypedValue, E> {
                Ok(TypedValue(value.to_string()))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<TypedValue, E> {
                Ok(TypedValue(value.to_string()))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<TypedValue, E> {
                Ok(TypedValue(value.to_owned()))
            }
        }
        deserializer.deserialize_any(Scalar)
    }
}

impl Serialize for TypedValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}
