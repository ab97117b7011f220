//! The two ways in which a world can end.

/// How a world ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crash {
    /// The machine loses power: memory, the note and volatile caches are lost.
    PowerCut,
    /// The process dies; devices and note remain.
    ProcessDeath,
}

impl std::fmt::Display for Crash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::PowerCut => "power",
            Self::ProcessDeath => "death",
        })
    }
}

impl std::str::FromStr for Crash {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "power" => Ok(Self::PowerCut),
            "death" => Ok(Self::ProcessDeath),
            other => Err(format!("a crash is power or death, not {other:?}")),
        }
    }
}
