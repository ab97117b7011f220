//! The forms of the texts in control files.

/// The expected form of a file's text.
#[derive(Clone, Copy)]
pub enum TextFormat {
    /// The file cannot be read.
    No,
    /// `4.0M`
    Size,
    /// A whole number.
    Number,
    /// A whole number or -1.
    Since,
    /// 0 or 1.
    Flag,
    /// All of these words, one of them in brackets.
    Words(&'static [&'static str]),
    /// This text and a newline.
    Text(&'static str),
    /// Exactly this text.
    Exact(&'static str),
    Uuid,
    /// Lines of a label with tabs, and a value of that kind.
    Lines(&'static [(&'static str, LineFormat)]),
}

#[derive(Clone, Copy)]
pub enum LineFormat {
    Number,
    Percent,
    Size,
    Rate,
    Milliseconds,
    Quantiles,
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_size(text: &str) -> bool {
    let text = text.strip_prefix('-').unwrap_or(text);
    let Some((whole, rest)) = text.split_once('.') else { return false };
    let (tenth, unit) = rest.split_at(rest.len().min(1));
    is_number(whole)
        && whole.len() <= 3
        && is_number(tenth)
        && matches!(unit, "k" | "M" | "G" | "T" | "P" | "E")
}

impl LineFormat {
    pub fn fits(self, text: &str) -> bool {
        let before = |end: &str, fits: fn(&str) -> bool| text.strip_suffix(end).is_some_and(fits);
        match self {
            Self::Number => is_number(text),
            Self::Percent => before("%", is_number),
            Self::Size => is_size(text),
            Self::Rate => before("/sec", is_size),
            Self::Milliseconds => before("ms", |text| is_number(text.strip_prefix('-').unwrap_or(text))),
            Self::Quantiles => {
                let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
                inner.is_some_and(|text| text.split(' ').filter(|age| is_number(age)).count() == 31)
            }
        }
    }
}

impl TextFormat {
    pub fn fits(self, text: &str) -> bool {
        if let Self::Exact(exact) = self {
            return text == exact;
        }
        let Some(line) = text.strip_suffix('\n') else { return false };
        match self {
            Self::No | Self::Exact(_) => false,
            Self::Size => is_size(line),
            Self::Number => is_number(line),
            Self::Since => line == "-1" || is_number(line),
            Self::Flag => matches!(line, "0" | "1"),
            Self::Text(text) => line == text,
            Self::Words(words) => {
                let chosen =
                    line.split(' ').filter(|word| word.starts_with('[') && word.ends_with(']')).count();
                let bare: Vec<_> = line.split(' ').map(|word| word.trim_matches(['[', ']'])).collect();
                chosen == 1 && bare == words
            }
            Self::Uuid => line.len() == 36 && line.split('-').map(str::len).eq([8, 4, 4, 4, 12]),
            Self::Lines(expected) => {
                let lines: Vec<_> = line.split('\n').collect();
                let fits = |(line, (label, kind)): (&&str, &(&str, LineFormat))| {
                    line.strip_prefix(label).is_some_and(|said| kind.fits(said))
                };
                lines.len() == expected.len() && lines.iter().zip(expected).all(fits)
            }
        }
    }
}
