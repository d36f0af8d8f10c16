// A table that grows by rows. A long one is divided into bodies that a browser lays out only when
// they are near the screen; its columns then follow from its first rows, because no layout of all
// rows tells how wide they are.

import { el } from "../parts.js";

const PART = 40; // rows of a body; a table with more is a long one
const NARROWEST = 4; // characters of a column of a long table
const WIDEST = 40; // beyond which its cells break their lines

// A table whose parts are elements, from rows of cells that are `el` already.
export class Table {
	#table;
	#body = el("tbody");
	#isLong = false;

	constructor(head) {
		this.#table = el("table", "", el("thead", "", head), this.#body);
		this.made = el("div", "table", this.#table);
		this.made.tabIndex = 0;
		this.made.role = "group"; // no landmark: an answer may have several
		this.made.ariaLabel = "Table";
	}

	// Adds rows that stay.
	append(...rows) {
		for (const row of rows) {
			if (this.#body.childElementCount >= PART) this.#divide();
			this.#add(row);
		}
	}

	// Shows rows that may be removed again.
	show(...rows) {
		for (const row of rows) this.#add(row);
	}

	#add(row) {
		if (this.#isLong) tell(row);
		this.#body.append(row);
	}

	#divide() {
		if (!this.#isLong) this.#lengthen();
		this.#body = el("tbody", "rows");
		this.#body.role = "rowgroup";
		this.#table.append(this.#body);
	}

	#lengthen() {
		this.#isLong = true;
		this.#body.className = "rows";
		this.#table.className = "long";
		this.#table.style.setProperty("--columns", columns([...this.#table.rows]));
		this.#table.role = "table";
		for (const group of this.#table.children) group.role = "rowgroup";
		for (const row of this.#table.rows) tell(row);
	}
}

// Boxes of a grid are no parts of a table to every reader of screens: their roles are said.
function tell(row) {
	row.role = "row";
	for (const cell of row.cells) cell.role = cell.localName === "th" ? "columnheader" : "cell";
}

// Widths by the longest texts.
function columns(rows) {
	const longest = (i) => Math.max(NARROWEST, ...rows.map(({ cells }) => Math.min(cells[i].textContent.length, WIDEST)));
	return [...rows[0].cells].map((_, i) => `minmax(calc(${longest(i)}ch + 1.3rem), ${longest(i)}fr)`).join(" ");
}
