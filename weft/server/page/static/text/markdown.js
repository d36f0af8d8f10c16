// A model's Markdown as nodes. Nothing is parsed as HTML: texts become text nodes, and an address
// becomes a link only if its scheme is harmless.

import { Marked } from "../vendor/marked.js";
import { el } from "../parts.js";
import { codeBlock } from "./code.js";
import { math } from "./math.js";
import { Table } from "./table.js";

const LONGEST_LINE = 20_000; // a longer one is shown as it stands, so that no pattern runs over it
const DEEPEST = 30; // levels of nested blocks and marks; deeper ones are shown as they stand
const NESTED = new RegExp(`^(?:[ \\t]*(?:>|[-*+](?=[ \\t])|\\d{1,9}[.)](?=[ \\t]))){${DEEPEST},}`, "m");
const HARMLESS = /^(https?:|mailto:)/i;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–", times: "×", rarr: "→", larr: "←" };

const parser = new Marked({ gfm: true });
parser.use({ extensions: [
	{
		name: "formula", level: "block",
		start: (text) => text.match(/(?<=\n) {0,3}(\$\$|\\\[)/)?.index,
		tokenizer: (text) => formula(text, /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n+|$)/, true),
	},
	{
		name: "formula", level: "inline",
		start: (text) => text.match(/\$|\\[([]/)?.index,
		tokenizer: (text) => formula(text, /^(?:\$\$([^\n]+?)\$\$|\\\[([^\n]+?)\\\])/, true)
			|| formula(text, /^(?:\$(?![\s$])((?:\\.|[^\\$\n])*?)(?<!\s)\$(?!\d)|\\\(([^\n]+?)\\\))/, false),
	},
] });

function formula(text, pattern, isBlock) {
	const found = text.match(pattern);
	return found ? { type: "formula", raw: found[0], text: (found[1] ?? found[2]).trim(), isBlock } : undefined;
}

// The blocks of a text; their `raw` parts make up the text.
export function blocks(text) {
	const isLong = text.split("\n").some((line) => line.length > LONGEST_LINE);
	if (isLong || NESTED.test(text)) return [plain(text)];
	try {
		return parser.lexer(text);
	} catch {
		return [plain(text)]; // for example, nested too deeply
	}
}

const plain = (raw) => ({ type: "plain", raw });

// ---- blocks

const BLOCKS = {
	space: () => null,
	def: () => null,
	plain: ({ raw }) => el("p", "", raw),
	html: ({ raw }) => el("p", "", raw.trimEnd()),
	hr: () => el("hr"),
	code: ({ text, lang }) => codeBlock(text, lang).end(),
	formula: ({ text, isBlock }) => math(text, isBlock),
	heading: ({ depth, tokens }) => el(`h${Math.min(depth + 2, 6)}`, "", ...inline(tokens)),
	paragraph: ({ tokens }) => el("p", "", ...inline(tokens)),
	text: ({ tokens, text }) => el("span", "", ...(tokens ? inline(tokens) : [unescaped(text)])),
	blockquote: ({ tokens }) => el("blockquote", "", ...nodes(tokens)),
	checkbox: ({ checked }) => checkbox(checked),
	list,
	table: (token) => tableOf(token).made,
};

// The node of a block; null if it shows nothing.
export const node = (token) => (BLOCKS[token.type] || BLOCKS.plain)(token);

const nodes = (tokens) => deeper(tokens, () => tokens.map(node).filter(Boolean));

let depth = 0;

function deeper(tokens, draw) {
	if (depth >= DEEPEST) return tokens.map(({ raw }) => raw);
	depth++;
	try {
		return draw();
	} finally {
		depth--;
	}
}

function list({ ordered, start, items }) {
	const made = el(ordered ? "ol" : "ul", "", ...items.map(item));
	if (ordered && start > 1) made.start = start;
	return made;
}

export const item = ({ tokens, task, checked }) => {
	const has = tokens.some((one) => one.type === "checkbox" || one.tokens?.[0]?.type === "checkbox");
	return el("li", "", ...(task && !has ? [checkbox(checked)] : []), ...nodes(tokens));
};

const checkbox = (checked) => Object.assign(el("input"), { type: "checkbox", checked: Boolean(checked), disabled: true, ariaLabel: "done" });

export function tableOf({ header, rows }) {
	const made = new Table(row(header, "th"));
	made.append(...rows.map((cells) => row(cells)));
	return made;
}

export function row(cells, tag = "td") {
	return el("tr", "", ...cells.map(({ tokens, align }) => el(tag, align ? "to-" + align : "", ...inline(tokens))));
}

// ---- inside of a line

const INLINE = {
	strong: ({ tokens }) => el("b", "", ...inline(tokens)),
	em: ({ tokens }) => el("em", "", ...inline(tokens)),
	del: ({ tokens }) => el("s", "", ...inline(tokens)),
	codespan: ({ text }) => el("code", "", text),
	br: () => el("br"),
	escape: ({ text }) => text,
	text: ({ tokens, text }) => (tokens ? el("span", "", ...inline(tokens)) : unescaped(text)),
	link: ({ href, tokens, raw }) => link(href, raw, inline(tokens)),
	// A picture of another host would be a request to it: only its address is shown.
	image: ({ href, text, raw }) => link(href, raw, ["▣ " + (text || href)]),
	formula: ({ text, isBlock }) => math(text, isBlock),
	checkbox: ({ checked }) => checkbox(checked),
};

const inline = (tokens) => deeper(tokens, () => tokens.map((token) => (INLINE[token.type] || (({ raw }) => raw))(token)));

function link(href, raw, words) {
	if (!HARMLESS.test(href)) return raw;
	return Object.assign(el("a", "", ...words), { href, target: "_blank", rel: "noopener noreferrer" });
}

function unescaped(text) {
	return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,8}));/g, (all, decimal, hex, name) => {
		if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : all;
		const sign = decimal ? Number(decimal) : parseInt(hex, 16);
		return sign > 0 && sign <= 0x10ffff ? String.fromCodePoint(sign) : all;
	});
}
